"""The APIs by which agents call the policy: OpenAI's chat completions, completions and responses, Anthropic's messages.

An API reads a request as an `ApiRequest`, and writes the policy's turn, an `AssistantTurn`. A field that cannot be
served exactly is refused in the API's own form, with its name. Formats: platform.openai.com/docs/api-reference,
docs.anthropic.com/en/api.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal

from rlflow.environments.bridge import Message, message, text_of
from rlflow.environments.tool_calls import ToolCall
from rlflow.errors import UserError

MOST_CHOICES = 64
MESSAGE_FIELDS = frozenset(["role", "content", "name", "tool_calls", "tool_call_id"])
COMPLETION_LENGTH = 16  # tokens of a completion that says nothing of its length, as OpenAI's
Body = dict[str, Any]


class RequestError(Exception):
    """The error of a request that is not served.

    Args:
        text: Message: what was found, and what to do.
        param: Field of the request; None where it is none.
        status: HTTP status.
        code: The API's word for the kind of error.
    """

    def __init__(
        self, text: str, param: str | None = None, status: int = 400, code: str = "unsupported_parameter"
    ) -> None:
        super().__init__(text)
        self.param = param
        self.status = status
        self.code = code


@dataclass(frozen=True)
class ApiRequest:
    """A request in the form that all APIs share.

    Attributes:
        messages: Messages that the policy reads, in the form that chat templates take.
        tools: JSON schemas of functions, as chat templates take them.
        longest: Tokens that it may write, at most; None for as many as there is room for.
        n: Number of answers that are wanted.
        seed: The client's seed; it goes into the seed of the answers. None if there is none.
        stop: Texts before which an answer ends.
        logprobs: Whether log-probabilities are wanted.
        stream: Whether the answer is wanted as events.
        usage: Whether events end with the numbers of tokens.
        prompt: A text or token ids that the policy reads in place of messages; None where there are messages.
        branch: The name that the agent gives to a part of its work, in `metadata`; empty if there is none.
        model: The name by which it calls the policy.
    """

    messages: list[Message]
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    longest: int | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    prompt: str | tuple[int, ...] | None = None
    branch: str = ""
    model: str = ""

    @property
    def reads(self) -> str:
        """The field of the request with the input of the policy."""
        return "messages" if self.prompt is None else "prompt"


@dataclass(frozen=True)
class AssistantTurn:
    """The policy's turn in one answer.

    Attributes:
        text: Text of the answer, without calls.
        calls: Calls of tools.
        cut: Whether it was cut at its longest length.
        read: Number of tokens that it read.
        wrote: Number of tokens that it wrote.
        stop: The given text before which the answer ended; empty if it ended by itself.
        logprobs: Text and log-probability of each written token, where they are wanted.
    """

    text: str
    calls: tuple[ToolCall, ...]
    cut: bool
    read: int
    wrote: int
    stop: str = ""
    logprobs: tuple[tuple[str, float], ...] = ()

    @property
    def message(self) -> Message:
        """The turn as a message, as a later request repeats it."""
        return _assistant(self.text, self.calls)


@dataclass(frozen=True)
class Answer:
    """The answer to a request: its id, the name of the model, and the policy's turn, `n` times."""

    id: str
    model: str
    created: int
    request: ApiRequest
    turns: Sequence[AssistantTurn]

    @property
    def read(self) -> int:
        """Number of tokens that the policy read."""
        return self.turns[0].read

    @property
    def wrote(self) -> int:
        """Number of tokens that it wrote, in all answers."""
        return sum(each.wrote for each in self.turns)


class API(ABC):
    """An HTTP API by which agents call the policy.

    Attributes:
        path: Path of its requests.
        served: Fields that are read.
        neutral: Fields that may only have the values with which they change nothing.
        unread: Fields that say nothing to a policy.
    """

    path: ClassVar[str]
    served: ClassVar[frozenset[str]]
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]]
    unread: ClassVar[frozenset[str]] = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key"})

    def read_request(self, body: Any, temperatures: Mapping[str, float], ignored: Collection[str]) -> ApiRequest:
        """Read a request.

        Args:
            body: JSON of the request.
            temperatures: Temperature of each policy in this run, by the name by which it is called.
            ignored: Fields that the run leaves out of account.

        Raises:
            RequestError: A field is not served.
        """
        if not isinstance(body, dict):
            raise RequestError(f"the request is {body!r:.60}; send an object", code="invalid_value")
        body = {name: value for name, value in body.items() if value is not None and name not in ignored}
        model = body.get("model")
        if not isinstance(model, str) or model not in temperatures:
            names = " or ".join(map(repr, temperatures))
            text = f"there is no model {model!r:.60}; this episode's policy is called {names}"
            raise RequestError(text, "model", 404, "model_not_found")
        for name, value in body.items():
            if name in self.served or name in self.unread or value in self.neutral.get(name, ()):
                continue
            raise RequestError(f"`{name}` is {value!r:.60} and is not served; leave it out", name)
        # Where the likeliest token is taken, as in validation's second pass, that is decided for the whole run.
        temperature = temperatures[model]
        if (given := body.get("temperature", temperature)) != temperature and temperature != 0:
            raise RequestError(
                f"`temperature` is {given!r:.20} and the policy is sampled at {temperature:g}; leave it out, or name it"
                " in the harness's `ignore`",
                "temperature",
            )
        try:
            return replace(self._read_body(body), branch=_branch(body), model=model)
        except UserError as error:  # of a message's content
            raise RequestError(str(error), "messages", code="invalid_value") from error

    @abstractmethod
    def _read_body(self, body: Body) -> ApiRequest:
        """Read a request whose fields are all served."""

    @abstractmethod
    def answer(self, answer: Answer) -> Body:
        """Write an answer."""

    def events(self, answer: Answer) -> Iterator[str]:
        """The events of a stream, each the data of a server-sent event."""
        raise AssertionError(f"{self.path} has no streams")

    def problem(self, refused: RequestError) -> Body:
        """The error in the form of the API."""
        error = {"message": str(refused), "type": "invalid_request_error", "param": refused.param, "code": refused.code}
        return {"error": error}


class Chat(API):
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"
    served = frozenset(
        [
            "model",
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "n",
            "temperature",
            "stream",
            "stream_options",
            "tools",
            "logprobs",
            "seed",
            "stop",
        ]
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "top_p": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto",),
        "parallel_tool_calls": (True,),
        "top_logprobs": (0,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
    }

    def _read_body(self, body: Body) -> ApiRequest:
        longest = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        return ApiRequest(
            messages=[_chat_message(each, f"messages[{place}]") for place, each in enumerate(_list(body, "messages"))],
            tools=[_tool(each.get("function"), each, f"tools[{place}]") for place, each in _tools(body)],
            longest=_whole(body, longest),
            n=_whole(body, "n", most=MOST_CHOICES) or 1,
            seed=_whole(body, "seed", least=None),
            stop=_stop(body, "stop"),
            logprobs=_flag(body, "logprobs"),
            stream=_flag(body, "stream"),
            usage=_wants_usage(body),
        )

    def answer(self, answer: Answer) -> Body:
        choices = []
        for index, turn in enumerate(answer.turns):
            content = {"role": "assistant", "content": turn.text or None if turn.calls else turn.text, "refusal": None}
            calls = {"tool_calls": [_chat_call(call) for call in turn.calls]} if turn.calls else {}
            choices.append(
                {
                    "index": index,
                    "message": content | calls,
                    "finish_reason": _finish(turn),
                    "logprobs": _logprobs(turn) if answer.request.logprobs else None,
                }
            )
        return self._body(answer, "chat.completion", choices) | {"usage": _usage(answer)}

    def events(self, answer: Answer) -> Iterator[str]:
        """Each choice in one piece: a turn is sent when it has ended."""
        for index, turn in enumerate(answer.turns):
            calls = [{"index": place, **_chat_call(call)} for place, call in enumerate(turn.calls)]
            delta = {"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {})
            logprobs = _logprobs(turn) if answer.request.logprobs else None
            for piece, finish in ((delta, None), ({}, _finish(turn))):
                choice = {"index": index, "delta": piece, "finish_reason": finish, "logprobs": logprobs}
                yield json.dumps(self._body(answer, "chat.completion.chunk", [choice]))
                logprobs = None
        if answer.request.usage:
            yield json.dumps(self._body(answer, "chat.completion.chunk", []) | {"usage": _usage(answer)})
        yield "[DONE]"

    def _body(self, answer: Answer, kind: str, choices: list[Body]) -> Body:
        id = f"chatcmpl-{answer.id}"
        return {"id": id, "object": kind, "created": answer.created, "model": answer.model, "choices": choices}


class Completions(API):
    """OpenAI's completions: a text or token ids are continued, without a chat template."""

    path = "/v1/completions"
    served = frozenset(
        ["model", "prompt", "max_tokens", "n", "temperature", "stream", "stream_options", "logprobs", "seed", "stop"]
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "top_p": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    def _read_body(self, body: Body) -> ApiRequest:
        given = body.get("prompt")
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
            (given,) = given
        of_ids = isinstance(given, list) and all(type(each) is int for each in given)
        if not given or not (isinstance(given, str) or of_ids):
            text = f"`prompt` is {given!r:.60}; give one text, or the ids of its tokens"
            raise RequestError(text, "prompt", code="invalid_value")
        if body.get("logprobs", 0) not in (0, False):
            text = f"`logprobs` is {body['logprobs']!r:.60}; those of other tokens are not known, so give 0"
            raise RequestError(text, "logprobs")
        return ApiRequest(
            messages=[],
            longest=_whole(body, "max_tokens") or COMPLETION_LENGTH,
            n=_whole(body, "n", most=MOST_CHOICES) or 1,
            seed=_whole(body, "seed", least=None),
            stop=_stop(body, "stop"),
            logprobs=body.get("logprobs") == 0 and body["logprobs"] is not False,
            stream=_flag(body, "stream"),
            usage=_wants_usage(body),
            prompt=given if isinstance(given, str) else tuple(given),
        )

    def answer(self, answer: Answer) -> Body:
        choices = [self._choice(index, turn) for index, turn in enumerate(answer.turns)]
        return self._body(answer, choices) | {"usage": _usage(answer)}

    def events(self, answer: Answer) -> Iterator[str]:
        """Each choice in one piece."""
        for index, turn in enumerate(answer.turns):
            yield json.dumps(self._body(answer, [self._choice(index, turn)]))
        if answer.request.usage:
            yield json.dumps(self._body(answer, []) | {"usage": _usage(answer)})
        yield "[DONE]"

    def _choice(self, index: int, turn: AssistantTurn) -> Body:
        tokens = [text for text, _ in turn.logprobs]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [logprob for _, logprob in turn.logprobs],
            "text_offset": [0, *accumulate(map(len, tokens))][: len(tokens)],
            "top_logprobs": None,
        }
        choice = {"index": index, "text": turn.text, "finish_reason": _finish(turn)}
        return choice | {"logprobs": logprobs if tokens else None}

    def _body(self, answer: Answer, choices: list[Body]) -> Body:
        kind = {"object": "text_completion", "created": answer.created}
        return {"id": f"cmpl-{answer.id}", **kind, "model": answer.model, "choices": choices}


class Responses(API):
    """OpenAI's responses, without state on the server."""

    path = "/v1/responses"
    served = frozenset(["model", "input", "instructions", "max_output_tokens", "temperature", "tools", "stream"])
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "top_p": (1,),
        "store": (False,),
        "background": (False,),
        "tool_choice": ("auto",),
        "parallel_tool_calls": (True,),
        "include": ([],),
        "text": ({"format": {"type": "text"}},),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
    }

    def _read_body(self, body: Body) -> ApiRequest:
        given = body.get("input", [])
        items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(body, "input")
        messages = [message("system", body["instructions"])] if "instructions" in body else []
        for place, item in enumerate(items):
            _add_item(messages, item, f"input[{place}]")
        tools = [_tool(each, each, f"tools[{place}]") for place, each in _tools(body)]
        longest, stream = _whole(body, "max_output_tokens"), _flag(body, "stream")
        return ApiRequest(messages, tools, longest=longest, stream=stream)

    def answer(self, answer: Answer) -> Body:
        (turn,) = answer.turns
        output: list[Body] = []
        if turn.text or not turn.calls:
            part = {"type": "output_text", "text": turn.text, "annotations": []}
            output.append(
                {
                    "id": f"msg_{answer.id}",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [part],
                }
            )
        for call in turn.calls:
            arguments = json.dumps(call.arguments)
            output.append(
                {
                    "id": f"fc_{call.id}",
                    "type": "function_call",
                    "status": "completed",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": arguments,
                }
            )
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
            "status": "incomplete" if turn.cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if turn.cut else None,
            "error": None,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": answer.read,
                "output_tokens": answer.wrote,
                "total_tokens": answer.read + answer.wrote,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }

    def events(self, answer: Answer) -> Iterator[str]:
        """Each item in one piece."""
        whole = self.answer(answer)
        begun = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        pieces: list[Body] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        for place, item in enumerate(whole["output"]):
            at = {"item_id": item["id"], "output_index": place}
            if item["type"] == "message":
                (part,) = item["content"]
                at["content_index"] = 0
                empty: Body = {"content": []}
                text = {"text": part["text"], "logprobs": list[Body]()}
                inside = [
                    {"type": "response.content_part.added", "part": part | {"text": ""}, **at},
                    {"type": "response.output_text.delta", "delta": part["text"], "logprobs": [], **at},
                    {"type": "response.output_text.done", **text, **at},
                    {"type": "response.content_part.done", "part": part, **at},
                ]
            else:
                empty, kind, arguments = {"arguments": ""}, "response.function_call_arguments", item["arguments"]
                done = {"arguments": arguments, "name": item["name"]}
                inside = [{"type": f"{kind}.delta", "delta": arguments, **at}, {"type": f"{kind}.done", **done, **at}]
            open_item = item | {"status": "in_progress"} | empty
            pieces.append({"type": "response.output_item.added", "output_index": place, "item": open_item})
            pieces += [*inside, {"type": "response.output_item.done", "output_index": place, "item": item}]
        pieces.append({"type": f"response.{whole['status']}", "response": whole})
        for number, piece in enumerate(pieces):
            yield json.dumps(piece | {"sequence_number": number})


class Messages(API):
    """Anthropic's messages."""

    path = "/v1/messages"
    served = frozenset(["model", "messages", "system", "max_tokens", "temperature", "tools", "stop_sequences"])
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "top_p": (1,),
        "stream": (False,),
        "tool_choice": ({"type": "auto"},),
        "thinking": ({"type": "disabled"},),
        "service_tier": ("auto", "standard_only"),
    }

    def _read_body(self, body: Body) -> ApiRequest:
        messages = [message("system", text_of(body["system"], "`system`"))] if "system" in body else []
        for place, given in enumerate(_list(body, "messages")):
            _add_blocks(messages, given, f"messages[{place}]")
        tools = []
        for place, each in _tools(body):
            if each.get("type", "custom") != "custom":
                where = f"tools[{place}]"
                raise RequestError(
                    f"`{where}` is of type {each['type']!r:.60}, which Anthropic runs; give functions", where
                )
            schema = {**each, "parameters": each.get("input_schema", {})}
            tools.append(_tool(schema, {"type": "function"}, f"tools[{place}]"))
        return ApiRequest(messages, tools, longest=_whole(body, "max_tokens"), stop=_stop(body, "stop_sequences"))

    def answer(self, answer: Answer) -> Body:
        (turn,) = answer.turns
        content: list[Body] = [{"type": "text", "text": turn.text}] if turn.text or not turn.calls else []
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in turn.calls
        ]
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        stopped = {"stop_reason": "stop_sequence"} if turn.stop else {}
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": content,
            "stop_reason": reasons[_finish(turn)],
            "stop_sequence": turn.stop or None,
            "usage": {"input_tokens": answer.read, "output_tokens": answer.wrote},
        } | stopped

    def problem(self, refused: RequestError) -> Body:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(refused.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}}


APIS: dict[str, API] = {api.path: api for api in (Chat(), Completions(), Responses(), Messages())}


def _assistant(text: str, calls: Sequence[ToolCall]) -> Message:
    """A turn of the policy, in the form that chat templates take."""
    made = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in calls
    ]
    return message("assistant", text, **({"tool_calls": made} if made else {}))


def _branch(body: Body) -> str:
    metadata = body.get("metadata")
    name = metadata.get("branch", "") if isinstance(metadata, dict) else ""
    if not isinstance(name, str):
        raise RequestError(f"`metadata.branch` is {name!r:.60}; give a name", "metadata", code="invalid_value")
    return name


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"`{name}` is {value!r:.60}; give true or false", name, code="invalid_value")
    return bool(value)


def _wants_usage(body: Body) -> bool:
    stream = body.get("stream_options")
    return isinstance(stream, dict) and stream.get("include_usage") is True


def _usage(answer: Answer) -> Body:
    total = answer.read + answer.wrote
    return {"prompt_tokens": answer.read, "completion_tokens": answer.wrote, "total_tokens": total}


def _finish(turn: AssistantTurn) -> Literal["stop", "length", "tool_calls"]:
    if turn.cut:
        return "length"
    return "tool_calls" if turn.calls else "stop"


def _chat_call(call: ToolCall) -> Body:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(turn: AssistantTurn) -> Body:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in turn.logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_message(given: Any, where: str) -> Message:
    """A message of a chat completion."""
    given = _object(given, where)
    role = "system" if given.get("role") == "developer" else given.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise RequestError(f"`{where}.role` is {role!r:.60}; give system, user, assistant or tool", f"{where}.role")
    for name, value in given.items():
        if name not in MESSAGE_FIELDS and _says_something(value):
            raise RequestError(f"`{where}.{name}` is not read; leave it out, or set it to null", f"{where}.{name}")
    text = "" if given.get("content") is None else text_of(given["content"], f"`{where}`")
    if role == "assistant":
        calls = given.get("tool_calls") or []
        return _assistant(text, [_given_call(each, f"{where}.tool_calls[{i}]") for i, each in enumerate(calls)])
    more = {name: str(given[name]) for name in ("name", "tool_call_id") if given.get(name)}
    return message(role, text, **more)


def _says_something(value: Any) -> bool:
    """Whether a field of a message has a value, and is not just a place that a client leaves empty."""
    if isinstance(value, dict):
        return any(map(_says_something, value.values()))
    return value not in (None, [], "")


def _given_call(given: Any, where: str) -> ToolCall:
    given = _object(given, where)
    function = _object(given.get("function"), f"{where}.function")
    return _made(given.get("id"), function.get("name"), _arguments(function.get("arguments"), where))


def _made(id: Any, name: Any, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(str(name or ""), arguments, id=str(id or ""))


def _arguments(given: Any, where: str) -> Mapping[str, Any]:
    """The arguments of a call, which OpenAI's APIs write as JSON in a text."""
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str | None) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"`{where}` has the arguments {given!r:.60}; give a JSON object", where, code="invalid_value"
        )
    return arguments


def _add_item(messages: list[Message], item: Any, where: str) -> None:
    """Add an item of a response's input; a turn's text and its calls become one message."""
    item = _object(item, where)
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(_chat_message({"role": item.get("role"), "content": _parts(item.get("content"))}, where))
    elif kind == "function_call":
        call = _made(item.get("call_id"), item.get("name"), _arguments(item.get("arguments"), where))
        if not messages or messages[-1]["role"] != "assistant":
            messages.append(message("assistant", ""))
        last = messages[-1]
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *_assistant("", [call])["tool_calls"]]}
    elif kind == "function_call_output":
        content = text_of(_parts(item.get("output") or ""), f"`{where}`")
        messages.append(message("tool", content, tool_call_id=str(item.get("call_id", ""))))
    else:
        raise RequestError(f"`{where}` is of type {kind!r:.60}; send messages and calls of functions", where)


def _parts(content: Any) -> Any:
    """The content of an item of a response's input, in the form of a chat completion's message."""
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text")
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in texts else part for part in content
    ]


def _add_blocks(messages: list[Message], given: Any, where: str) -> None:
    """Add a message of Anthropic's; the results of tools in it are messages of their own."""
    given = _object(given, where)
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"`{where}.role` is {role!r:.60}; give user or assistant", f"{where}.role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise RequestError(f"`{where}.content` is {content!r:.60}; give a text or blocks", where, code="invalid_value")
    texts, calls = [], []
    for place, block in enumerate(blocks):
        block = _object(block, f"{where}.content[{place}]")
        if block.get("type") == "tool_use" and role == "assistant":
            arguments = _arguments(block.get("input"), where)
            calls.append(_made(block.get("id"), block.get("name"), arguments))
        elif block.get("type") == "tool_result" and role == "user":
            turn = text_of(block.get("content") or "", f"`{where}`")
            messages.append(message("tool", turn, tool_call_id=str(block.get("tool_use_id", ""))))
        else:
            texts.append({name: block[name] for name in ("type", "text") if name in block})
    text = text_of(texts, f"`{where}`")
    if role == "assistant":
        messages.append(_assistant(text, calls))
    elif texts:
        messages.append(message("user", text))


def _tools(body: Body) -> Iterator[tuple[int, Body]]:
    for place, each in enumerate(body.get("tools", [])):
        yield place, _object(each, f"tools[{place}]")


def _tool(function: Any, tool: Body, where: str) -> Mapping[str, Any]:
    """A tool as chat templates take it."""
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"`{where}` is {tool!r:.60}; give functions with a `name`", where)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type") != "object" or not _is_schema(parameters):
        raise RequestError(f"`{where}` has the parameters {parameters!r:.60}; give the JSON schema of an object", where)
    described = {"description": str(function["description"])} if function.get("description") else {}
    return {"type": "function", "function": {"name": function["name"], **described, "parameters": parameters}}


def _is_schema(given: Any) -> bool:
    """Whether this may be a JSON schema: the parts that give the types of arguments have the right form."""
    if isinstance(given, bool):
        return True
    kinds = given.get("type", "") if isinstance(given, dict) else None
    if not isinstance(kinds, str) and not (isinstance(kinds, list) and all(isinstance(each, str) for each in kinds)):
        return False
    inner, options = given.get("properties", {}), given.get("anyOf", [])
    if not isinstance(inner, dict) or not isinstance(options, list):
        return False
    return all(map(_is_schema, (*inner.values(), *options)))


def _stop(body: Body, name: str) -> tuple[str, ...]:
    given = body.get(name, [])
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
        raise RequestError(f"`{name}` is {given!r:.60}; give texts", name, code="invalid_value")
    return tuple(texts)


def _object(given: Any, where: str) -> Body:
    if not isinstance(given, dict):
        raise RequestError(f"`{where}` is {given!r:.60}; send an object", where, code="invalid_value")
    return given


def _list(body: Body, name: str) -> list[Any]:
    given = body.get(name)
    if not isinstance(given, list) or not given:
        raise RequestError(f"`{name}` is {given!r:.60}; send at least one", name, code="invalid_value")
    return given


def _whole(body: Body, name: str, least: int | None = 1, most: int | None = None) -> int | None:
    given = body.get(name)
    if given is None:
        return None
    wrong = isinstance(given, bool) or not isinstance(given, int)
    if wrong or (least is not None and given < least) or (most is not None and given > most):
        upto = "" if most is None else f" to {most}"
        wanted = "a whole number" if least is None else f"a whole number from {least}{upto}"
        raise RequestError(f"`{name}` is {given!r:.60}; give {wanted}", name, code="invalid_value")
    return int(given)
