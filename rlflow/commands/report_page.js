"use strict";
// Shows the samples of the page's data block. All that a run wrote is set as text, never as HTML.
const data = JSON.parse(document.getElementById("samples").textContent);
const form = document.getElementById("filters"), list = document.getElementById("list"), count = document.getElementById("count");
const SHOWN = 20;
let most = SHOWN;

function made(tag, name, text) {
  const element = document.createElement(tag);
  element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

function spoken(content) {
  return typeof content === "string" ? content : JSON.stringify(content, null, 1);
}

function turn(who, text, isPolicy) {
  const part = made("div", isPolicy ? "assistant" : "other");
  part.append(made("div", "who", who), made("p", "text", text));
  return part;
}

function card(sample) {
  const article = made("article", ""), header = made("header", "");
  const facts = [`row ${sample.row}`, `sample ${sample.sample}`, `ended: ${sample.ended}`];
  if (data.runs.length > 1) facts.unshift(data.runs[sample.run]);
  if (sample.failed) facts.push(`the reward failed on it (${sample.failed})`);
  for (const [name, value] of Object.entries(sample.parts || {})) facts.push(`${name} ${value}`);
  for (const [name, value] of Object.entries(sample.columns || {})) facts.push(`${name}: ${value}`);
  header.append(made("b", "", `step ${sample.step}, reward ${sample.reward}`), ` ${facts.join(" · ")}`);
  article.append(header);
  if (sample.messages && sample.messages.length) {
    let number = 0;
    for (const message of sample.messages) {
      const isPolicy = message.role === "assistant";
      let who = isPolicy ? `assistant, turn ${++number}` : message.role;
      if (message.name) who += ` ${message.name}`;
      if (message.reward !== undefined) who += `, reward ${message.reward}`;
      if (message.unread !== undefined) who += ", which no turn reads";
      article.append(turn(who, spoken(message.content), isPolicy));
      if (message.ended) article.append(made("div", "who", `ended: ${message.ended}`));
    }
  } else {
    article.append(turn("prompt", sample.prompt, false), turn("response", sample.response, true));
  }
  return article;
}

function wanted() {
  const of = Object.fromEntries(new FormData(form)), search = of.search.toLowerCase();
  const number = (text, otherwise) => (text === "" ? otherwise : Number(text));
  return data.samples.filter((sample) =>
    (of.run === "" || sample.run === Number(of.run)) &&
    (of.step === "" || sample.step === Number(of.step)) &&
    (of.row === "" || sample.row === Number(of.row)) &&
    (of.ended === "" || sample.ended === of.ended) &&
    sample.reward >= number(of.least, -Infinity) && sample.reward <= number(of.most, Infinity) &&
    (search === "" || JSON.stringify([sample.prompt, sample.response, sample.messages]).toLowerCase().includes(search) ||
      `${sample.prompt}\n${sample.response}`.toLowerCase().includes(search)));
}

function show() {
  const found = wanted(), beside = form.elements.row.value !== "";
  list.className = beside ? "beside" : "";
  list.replaceChildren(...found.slice(0, most).map(card));
  count.textContent = `${found.length} of ${data.samples.length} samples` +
    (found.length > most ? `, the first ${most} of them shown` : "");
  document.getElementById("more").hidden = found.length <= most;
}

function options(name, values) {
  for (const [value, text] of values) form.elements[name].append(new Option(text, value));
}

const by = (name) => [...new Set(data.samples.map((sample) => sample[name]))];
options("run", data.runs.map((run, number) => [number, run]));
options("step", by("step").sort((a, b) => a - b).map((step) => [step, step]));
options("ended", by("ended").sort().map((ended) => [ended, ended]));
const steps = new Map();
for (const { row, step } of data.samples) steps.set(row, (steps.get(row) || new Set()).add(step));
const rows = [...steps].sort((a, b) => b[1].size - a[1].size || a[0] - b[0]);
options("row", rows.map(([row, of]) => [row, `${row} (${of.size} ${of.size === 1 ? "step" : "steps"})`]));
form.addEventListener("input", () => { most = SHOWN; show(); });
form.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("more").addEventListener("click", () => { most += SHOWN; show(); });
show();

// With `--watch` the page asks whether the run went on; what is read or filtered stays until it is loaded anew.
const version = document.body.dataset.version;
if (version) setInterval(async () => {
  const answer = await fetch("version").catch(() => null);
  if (answer && answer.ok && await answer.text() !== version) document.getElementById("newer").hidden = false;
}, 3000);
