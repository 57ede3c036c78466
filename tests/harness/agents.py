"""Agents that call the policy as their users would: by the `openai` and `anthropic` clients, or by HTTP alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

MODEL = "policy"
CRITIC = "critic-agent"
SLEEPS = "import time; time.sleep(600)  # of a test of harnesses"
INTEGERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": INTEGERS,
    },
}


RECEIVED = [0]
UNREAD = "nobody reads this"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def client(base_url: str, api_key: str) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def by_http(base_url: str, api_key: str) -> Any:
    import httpx

    return httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=60)


async def asked(calls: Any, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The message that answers these; `RECEIVED` counts its tokens.

    Raises:
        PermissionError: The door refuses it, with its status and text.
    """
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, **more}
    answer = await calls.post("/chat/completions", json=body)
    if answer.status_code != 200:
        raise PermissionError(answer.status_code, answer.text)
    RECEIVED[0] += answer.json()["usage"]["completion_tokens"]
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def acts(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """The agent that the row names; so one worker runs them all."""
    return globals()[row["agent"]](row, base_url, api_key)


async def talks(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Three turns, each after the others."""
    RECEIVED[0] = 0
    calls, messages = by_http(base_url, api_key), [user(row["question"])]
    for turn in range(3):
        messages += [await asked(calls, messages), user(f"and {turn}?")]
    return float(len(messages))


async def branches(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Two sub-agents at the same time, forks, equal calls, and a summary; each waits for a while now and then.

    The reward is how many tokens it received.
    """
    RECEIVED[0] = 0
    calls, draws = by_http(base_url, api_key), random.Random(time.time_ns())  # waits of their own in every run

    async def waits() -> None:
        await asyncio.sleep(draws.random() * row.get("waits", 0.0))

    async def helps(name: str) -> str:
        messages = [user(f"{name} of {row['question']}")]
        for _ in range(2):
            await waits()
            messages += [await asked(calls, messages), user("more")]
        return str(messages[-2]["content"])

    async def forks(text: str) -> None:
        await waits()
        messages = [*begun, user(text)]
        messages += [await asked(calls, messages), user("end")]
        await waits()
        await asked(calls, messages)

    begun = [user(row["question"])]
    begun.append(await asked(calls, begun))
    await asyncio.gather(helps("first"), helps("other"), forks("left"), forks("right"), forks("right"))
    await asked(calls, [user("a summary"), user("go on")])
    return {"reward": RECEIVED[0]}


async def toils(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Two sub-agents, forks, equal calls, retries, summaries and streams that it leaves, each after a random wait.

    The reward is how many tokens it received.
    """
    from httpx import ReadTimeout, Timeout

    RECEIVED[0] = 0
    calls, draws = by_http(base_url, api_key), random.Random(time.time_ns())

    async def waits() -> None:
        await asyncio.sleep(draws.random() * row["waits"])

    async def goes_on(messages: list[Any], new: str, **more: Any) -> list[Any]:
        await waits()
        asked_now = [*messages, user(new)]
        return [*asked_now, await asked(calls, asked_now, **more)]

    async def leaves(messages: list[Any]) -> None:
        await waits()
        body = {"model": MODEL, "messages": [*messages, user(UNREAD)], "max_tokens": 100, "stream": True}
        with suppress(ReadTimeout):  # it is gone before the policy may have said a token
            await calls.post("/chat/completions", json=body, timeout=Timeout(60, read=0.001))

    async def helps(name: str) -> None:
        messages = await goes_on([], f"{name} of {row['question']}", metadata={"branch": name}, seed=len(name))
        for turn in range(3):
            await leaves(messages)
            messages = await goes_on(messages, f"more {turn}", metadata={"branch": name}, seed=len(name))
            if turn == 1:  # too long: it goes on from a summary
                messages = await goes_on([], f"{name}, in short: {messages[-1]['content']}", max_tokens=3)

    async def retries(messages: list[Any]) -> None:
        await waits()
        key, body = {"Idempotency-Key": f"a try {len(messages)}"}, {"model": MODEL, "max_tokens": 6}
        body["messages"] = [*messages, user("once")]
        tries = [asyncio.ensure_future(calls.post("/chat/completions", json=body, headers=key)) for _ in range(3)]
        await waits()
        tries[0].cancel()
        first, second = [(await each).json() for each in tries[1:]]
        assert first == second
        RECEIVED[0] += first["usage"]["completion_tokens"]
        await goes_on([*body["messages"], first["choices"][0]["message"]], "and then")

    begun = await goes_on([], row["question"])
    same = (goes_on(begun, "again") for _ in range(3))
    forks = (goes_on(begun, each, n=1, stop="5") for each in ("left", "right"))
    await asyncio.gather(helps("first"), helps("other"), retries(begun), leaves(begun), *same, *forks)
    last = await goes_on([], f"a summary of {row['question']}", tools=[ADD])
    await goes_on(last, "end", tools=[ADD])
    return {"reward": RECEIVED[0], "branches": {}}


async def credits(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """One call, then the same by two branches, in the row's order; two of the three have rewards of their own."""
    calls = by_http(base_url, api_key)
    for name in ("", *row["order"]):
        await asked(calls, [user(row["question"])], metadata={"branch": name})
    return {"reward": 1.0, "branches": {"left": 0.25, "right": -0.5, "other": 9}}


async def forks_twice(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """A call that two branches continue, one of them by one more turn; and a call of its own."""
    calls, begun = by_http(base_url, api_key), [user(row["question"])]
    begun.append(await asked(calls, begun))
    left = [*begun, user("left")]
    left.append(await asked(calls, left))
    await asked(calls, [*left, user("more")], metadata={"branch": "left"})
    await asked(calls, [*begun, user("right")], metadata={"branch": "right"})
    await asked(calls, [user("alone")])
    odd = sum(map(ord, str(left[-1]["content"]))) % 7
    return {"reward": 1.0, "branches": {"left": 4.0 * odd, "right": -2.0}}


async def asks_a_critic(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """A turn, what another model says of it, and a turn after that; the reward is how many tokens the policy wrote."""
    RECEIVED[0] = 0
    calls, messages = by_http(base_url, api_key), [user(row["question"])]
    names = [each["id"] for each in (await calls.get("/models")).json()["data"]]
    assert names == [MODEL, CRITIC]
    said = await asked(calls, messages)
    own = RECEIVED[0]
    judged = await asked(calls, [user(f"judge {said['content']}")], model=CRITIC)
    RECEIVED[0] = own
    await asked(calls, [*messages, said, user(f"I heard {judged['content']}")])
    return float(RECEIVED[0])


async def follows(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """A turn, then one after each of the row's messages, with the row's tools."""
    calls, messages = by_http(base_url, api_key), [user(row["question"])]
    more = {"max_tokens": None, "tools": row["tools"] or None}
    for new in row["messages"]:
        messages += [await asked(calls, messages, **more), new]
    await asked(calls, messages, **more)
    return 0.0


async def calls_a_tool(row: dict[str, Any], base_url: str, api_key: str) -> float:
    calls, messages = client(base_url, api_key).chat.completions, [user(row["question"])]
    answer = await calls.create(model=MODEL, messages=messages, tools=[ADD])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 3}'), call
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    last = await calls.create(model=MODEL, messages=[*messages, answer.choices[0].message, result], tools=[ADD])
    return float(last.choices[0].message.content == row["answer"])


async def calls_the_second_tool(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """A call of a tool that is not the first, and its result, which names it by the id of the call alone."""
    calls, messages = by_http(base_url, api_key), [user(row["question"])]
    more = {
        "tools": [ADD, {"type": "function", "function": {"name": "second", "description": "Be."}}],
        "max_tokens": None,
    }
    said = await asked(calls, messages, **more)
    (call,) = said["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    await asked(calls, [*messages, said, result], **more)
    return float(said["content"] is None)


async def responds(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The same by `responses`."""
    calls, items = client(base_url, api_key).responses, [user(row["question"])]
    tool = {"type": "function", **ADD["function"]}
    answer = await calls.create(model=MODEL, input=items, tools=[tool])
    (call,) = answer.output
    assert (call.name, call.arguments) == ("add", '{"a": 2, "b": 3}'), call
    items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
    last = await calls.create(model=MODEL, input=items, tools=[tool])
    return float(last.output_text == row["answer"])


async def completes_sums(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """A text with its answer and more, where the answer ended by itself."""
    calls, text = client(base_url, api_key).completions, row["question"]
    for more in ("+1=", ""):
        answer = await calls.create(model=MODEL, prompt=text)
        text += answer.choices[0].text + more
    return float(text == row["answer"])


async def responds_in_events(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The same by events of `responses`."""
    calls, items = client(base_url, api_key).responses, [user(row["question"])]
    tool = {"type": "function", **ADD["function"]}
    async with calls.stream(model=MODEL, input=items, tools=[tool]) as stream:
        (call,) = (await stream.get_final_response()).output
    assert (call.name, call.arguments) == ("add", '{"a": 2, "b": 3}'), call
    items += [call.model_dump(include={"type", "call_id", "name", "arguments"})]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
    async with calls.stream(model=MODEL, input=items, tools=[tool]) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert (await stream.get_final_response()).output_text == text
    return float(text == row["answer"])


async def completes(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """A text, the same with its answer and more, token ids, and the first text again, in events.

    The reward is how many tokens it received.
    """
    calls, text = client(base_url, api_key).completions, row["question"]
    first = await calls.create(model=MODEL, prompt=text, max_tokens=6, logprobs=0)
    (choice,) = first.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs)
    more = await calls.create(model=MODEL, prompt=text + choice.text + " so", max_tokens=4)
    assert more.usage.prompt_tokens == first.usage.total_tokens + len(" so")  # a token each
    ids = await calls.create(model=MODEL, prompt=[5, 6, 7], max_tokens=1)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await calls.create(model=MODEL, prompt=text, max_tokens=2, **options)
    pieces = [piece async for piece in stream]
    assert pieces[0].choices[0].text
    assert all(each.choices[0].finish_reason == "length" for each in (first, more, ids, pieces[0]))
    return float(sum(each.usage.completion_tokens for each in (first, more, ids, pieces[-1])))


def claude(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The same by Anthropic's client."""
    from anthropic import Anthropic

    calls = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0).messages
    function = ADD["function"]
    tool = {"name": "add", "description": function["description"], "input_schema": function["parameters"]}
    messages = [user(row["question"])]
    answer = calls.create(model=MODEL, messages=messages, tools=[tool], max_tokens=100)
    (call,) = answer.content
    assert (answer.stop_reason, call.name, call.input) == ("tool_use", "add", {"a": 2, "b": 3}), answer
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    messages += [{"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    last = calls.create(model=MODEL, messages=messages, tools=[tool], max_tokens=100)
    return float(last.content[0].text == row["answer"])


async def gets_text(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """A turn with a tool, by Anthropic's API; the reward is 1 if it is the row's answer, as text."""
    tool = {"name": "add", "input_schema": INTEGERS}
    body = {"model": MODEL, "messages": [user(row["question"])], "tools": [tool], "max_tokens": 100}
    answer = await by_http(base_url, api_key).post("/messages", json=body)
    assert answer.status_code == 200, answer.text
    return float(answer.json()["content"] == [{"type": "text", "text": row["answer"]}])


async def streams(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The pieces of a stream, and three answers with log-probabilities, are what one call gives."""
    calls, messages = client(base_url, api_key), [user(row["question"])]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await calls.chat.completions.create(model=MODEL, messages=messages, **options)
    pieces = [piece async for piece in stream]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert pieces[-1].usage.completion_tokens >= len(text)
    messages += [{"role": "assistant", "content": text}, user("again")]
    answer = await calls.chat.completions.create(model=MODEL, messages=messages, n=3, logprobs=True, max_tokens=5)
    for choice in answer.choices:
        tokens = choice.logprobs.content
        assert len(tokens) <= 5
        assert all(token.logprob < 0 for token in tokens)
        assert "".join(token.token for token in tokens) == choice.message.content
    return float(len(answer.choices))


async def stops(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """An answer ends before a text, and the next call continues from there."""
    calls, messages = by_http(base_url, api_key), [user(row["question"])]
    message = await asked(calls, messages, stop=["Result:", "nowhere"], max_tokens=None)
    assert message["content"] == "add 2 and 3\n", message
    last = await asked(calls, [*messages, message, user("5")], stop="Result:", max_tokens=None)
    return float(last["content"] == row["answer"])


def retries(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Retries get the answer that is stored; a call that is the same but no retry gets another one."""
    import httpx

    body = {"model": MODEL, "messages": [user(row["question"])], "max_tokens": 8}
    keys: list[dict[str, str]] = [{}, {"x-stainless-retry-count": "1"}, {"x-stainless-retry-count": "0"}]
    keys += [{"Idempotency-Key": "one"}, {"Idempotency-Key": "one"}]
    said = []
    for key in keys:
        headers = {"Authorization": f"Bearer {api_key}", **key}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=60)
        said.append(answer.json()["choices"])
    other = {**body, "messages": [user("another question")]}
    answer = httpx.post(f"{base_url}/chat/completions", json=other, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_error")
    return float(said[0] == said[1] != said[2] and said[3] == said[4] != said[2])


def refused(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Refused requests, and how; the reward is the number that were refused rightly."""
    import httpx

    good = {"model": MODEL, "messages": [user("a")], "max_tokens": 2}
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    wrong: list[tuple[dict[str, Any], int, str | None]] = [
        ({"model": "gpt-4o"}, 404, "model"),
        ({"messages": [user("a" * 300)]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [image]}]}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        *(
            ({"tools": [{"type": "function", "function": {"name": "f", "parameters": given}}]}, 400, "tools[0]")
            for given in ({"type": "text"}, {"type": "object", "properties": 5}, {**INTEGERS, "properties": {"a": 5}})
        ),
        ({"temperature": 0.3}, 400, "temperature"),
        ({"stop": [1]}, 400, "stop"),
        ({"top_p": 0.5}, 400, "top_p"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"n": 0}, 400, "n"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"guided_json": {}}, 400, "guided_json"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
        ({"tools": 5}, 400, None),
        ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, 400, "messages"),
        ({"max_tokens": 0.5}, 400, "max_tokens"),
        ({"stream": 1}, 400, "stream"),
        ({"logprobs": 5}, 400, "logprobs"),
        *(
            ({"messages": [{"role": "assistant", "content": "b", name: said}]}, 400, f"messages[0].{name}")
            for name, said in (("reasoning_content", "so"), ("function_call", {"name": "f", "arguments": "{}"}))
        ),
    ]
    right = 0
    for change, status, param in wrong:
        sent = json.dumps(good | change)  # in ASCII: a half character is none of UTF-8
        answer = httpx.post(
            f"{base_url}/chat/completions", content=sent, headers={"Authorization": f"Bearer {api_key}"}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), (change, answer.status_code, error)
        right += 1
    bad_key = httpx.post(f"{base_url}/chat/completions", json=good, headers={"Authorization": "Bearer sk-x"})
    assert (bad_key.status_code, bad_key.json()["error"]["code"]) == (401, "invalid_api_key")
    headers = {"Authorization": f"Bearer {api_key}"}
    no_utf8 = json.dumps(good).encode()[:-1] + b', "user": "\xff"}'
    for content in (b"{", b'"a"', b"", no_utf8):
        answer = httpx.post(f"{base_url}/chat/completions", content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        right += 1
    assert httpx.get(f"{base_url}/files", headers=headers).status_code == 404
    for prompt in ("", [-1], [[1], [2]]):
        answer = httpx.post(f"{base_url}/completions", json={"model": MODEL, "prompt": prompt}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), answer.text
        right += 1
    of_anthropic = {"tools": [{"type": "web_search_20250305", "name": "web_search"}], **good}
    answer = httpx.post(f"{base_url}/messages", json=of_anthropic, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    right += 1
    unknown = httpx.post(f"{base_url}/embeddings", json=good, headers=headers)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert httpx.get(f"{base_url}/models", headers=headers).json()["data"][0]["id"] == MODEL
    return {"reward": right}


def fails(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Fails as its row says, after one call."""
    asyncio.run(asked(by_http(base_url, api_key), [user(row["question"])]))
    how = row["how"]
    if how == "raises":
        raise ValueError(f"no answer with {api_key}")
    if how == "exits":
        os._exit(3)
    if how == "hangs":
        subprocess.Popen([sys.executable, "-c", SLEEPS], start_new_session=True)
        time.sleep(600)
    return {"nan": float("nan"), "huge": 10**400}.get(how, 1.0)


def leaves_a_process(row: dict[str, Any], base_url: str, api_key: str) -> float:
    subprocess.Popen([sys.executable, "-c", SLEEPS], start_new_session=True)
    return 1.0


def calls_late(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Calls by the key of the episode before, which has ended, then by its own."""
    import httpx

    body = {"model": MODEL, "messages": [user(row["question"])], "max_tokens": 2}
    own = httpx.post(f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {api_key}"})
    before, KEYS[:] = list(KEYS), [api_key]
    late = [
        httpx.post(f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}).status_code
        for key in before
    ]
    return float(own.status_code == 200 and late in ([], [401]))


KEYS: list[str] = []


async def floods(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Calls as often as it is let."""
    calls = by_http(base_url, api_key)
    for number in range(100):
        try:
            await asked(calls, [user(row["question"])], max_tokens=1)
        except PermissionError as error:
            return float(number) if error.errno == 429 else -1.0
    return 100.0


async def leaves(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Waits for one answer, and leaves two others open, one of them a stream."""
    calls = by_http(base_url, api_key)
    await asked(calls, [user(row["question"])])
    open_calls = [
        asyncio.ensure_future(asked(calls, [user("nobody reads this")], max_tokens=None, stream=stream))
        for stream in (False, True)
    ]
    await asyncio.sleep(0.05)
    for call in open_calls:
        call.cancel()
    return 1.0


def silent(row: dict[str, Any], base_url: str, api_key: str) -> int:
    return 3


async def talks_once(row: dict[str, Any], base_url: str, api_key: str) -> float:
    await asked(by_http(base_url, api_key), [user(row["question"])])
    return 0.0


async def at_a_temperature(row: dict[str, Any], base_url: str, api_key: str) -> float:
    await asked(by_http(base_url, api_key), [user(row["question"])], temperature=0.2, reasoning_effort="low")
    return 0.0


def kills(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """An episode of many branches; the sixth kills its rank before its end, once."""
    with open(os.environ["RLFLOW_TEST_KILLS"], "ab", buffering=0) as counter:
        counter.write(b"x")
        number = counter.tell()
    made = asyncio.run(branches(row, base_url, api_key))
    if number == 6:
        os.kill(os.getppid(), signal.SIGKILL)
    return float(made["reward"])
