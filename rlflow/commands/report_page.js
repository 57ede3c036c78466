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

// The parts of a message, or of a prompt: texts, and pictures in their places.
function spoken(content, pictures) {
  if (typeof content === "string") return [made("p", "text", content)];
  if (!Array.isArray(content)) return [made("p", "text", JSON.stringify(content, null, 1))];
  return content.map((part) => {
    if (part && part.type === "text") return made("p", "text", part.text);
    const isPicture = part && (part.type === "image" || part.type === "image_url") && pictures.length;
    return isPicture ? pictured(pictures.shift()) : made("p", "text", JSON.stringify(part, null, 1));
  });
}

function pictured(picture) {
  if (picture.why !== undefined) return made("p", "text faint", `no image ${picture.name}: ${picture.why}`);
  const image = made("img", "");
  image.src = data.pictures[picture.number];
  image.alt = image.title = picture.name;
  return image;
}

function turn(who, parts, isPolicy) {
  const part = made("div", isPolicy ? "assistant" : "other");
  part.append(made("div", "who", who), ...parts);
  return part;
}

// Which sample is meant: several of a step may continue one another, as leaves of a tree or rows of an agent's run.
const name = (sample) => sample.path || String(sample.sample);
const placed = (sample, of) => JSON.stringify([sample.run, sample.step, sample.row, of]);
const all = new Map(data.samples.map((sample) => [placed(sample, name(sample)), sample]));

function above(sample) {
  const of = sample.continues ? sample.continues.sample : sample.episode;
  return of === undefined ? undefined : all.get(placed(sample, of));
}

function card(sample, parent) {
  const article = made("article", ""), header = made("header", "");
  const facts = [`row ${sample.row}`, `sample ${name(sample)}`, `ended: ${sample.ended}`];
  if (data.runs.length > 1) facts.unshift(data.runs[sample.run]);
  if (sample.continues) facts.push(`begins with ${sample.continues.tokens} tokens of sample ${sample.continues.sample}`);
  else if (sample.episode) facts.push(`of the episode of sample ${sample.episode}`);
  if (sample.failed) facts.push(`the reward failed on it (${sample.failed})`);
  for (const [part, value] of Object.entries(sample.parts || {})) facts.push(`${part} ${value}`);
  for (const [column, value] of Object.entries(sample.columns || {})) facts.push(`${column}: ${value}`);
  header.append(made("b", "", `step ${sample.step}, reward ${sample.reward}`), ` ${facts.join(" · ")}`);
  article.append(header);
  const pictures = [...(sample.pictures || [])];
  if (sample.messages && sample.messages.length) article.append(...turns(sample.messages, parent, pictures));
  else {
    if (!parent) article.append(turn("prompt", [...pictures.map(pictured), made("p", "text", sample.prompt)], false));
    const text = made("p", "text"), begins = sample.continues ? sample.continues.text : "";
    const same = sample.response.startsWith(begins) ? begins.length : 0;
    text.append(made("span", "faint", sample.response.slice(0, same)), sample.response.slice(same));
    article.append(turn("response", [text], true));
  }
  return article;
}

// A conversation turn by turn; below the one that it continues, the messages of both are folded away.
function turns(messages, parent, pictures) {
  let number = 0, same = 0;
  const key = (message) => JSON.stringify([message.role, message.name, message.content]);
  const before = (parent && parent.messages) || [];
  while (same < messages.length && same < before.length && key(messages[same]) === key(before[same])) same++;
  const shown = messages.map((message) => {
    const isPolicy = message.role === "assistant";
    let who = isPolicy ? `assistant, turn ${++number}` : message.role;
    if (message.name) who += ` ${message.name}`;
    if (message.reward !== undefined) who += `, reward ${message.reward}`;
    if (message.unread !== undefined) who += ", which no turn reads";
    return turn(who, spoken(message.content, pictures), isPolicy);
  });
  const ended = messages.filter((message) => message.ended).map((message) => made("div", "who", `ended: ${message.ended}`));
  if (!same) return [...shown, ...ended];
  const folded = made("details", "");
  folded.append(made("summary", "", `${same} messages as in sample ${name(parent)}`), ...shown.slice(0, same));
  return [folded, ...shown.slice(same), ...ended];
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
  const shown = found.slice(0, most), cards = new Map();
  for (const sample of shown) {  // one that continues another comes within it, if that is shown
    const parent = above(sample);
    cards.set(sample, card(sample, shown.includes(parent) ? parent : undefined));
  }
  const isWithin = (sample) => cards.has(above(sample));
  for (const sample of shown.filter(isWithin)) cards.get(above(sample)).append(cards.get(sample));
  list.replaceChildren(...shown.filter((sample) => !isWithin(sample)).map((sample) => cards.get(sample)));
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
