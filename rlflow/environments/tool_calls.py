"""Calls of tools in the policy's turns, in the forms of several families of models.

    hermes       <tool_call>{"name": "guess", "arguments": {"word": "a"}}</tool_call>
    qwen3_coder  <tool_call><function=guess><parameter=word>a</parameter></function></tool_call>
    llama3       {"name": "guess", "parameters": {"word": "a"}}, perhaps after <|python_tag|>
    mistral      [TOOL_CALLS][{"name": "guess", "arguments": {"word": "a"}}], or [TOOL_CALLS]guess[ARGS]{"word": "a"}
    harmony      <|channel|>commentary to=functions.guess <|constrain|>json<|message|>{"word": "a"}<|call|>

The first is the form of Hermes, Qwen2.5 and Qwen3. All are the forms of the families' chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.S)
_CODER = re.compile(r"(?:<tool_call>\s*)?<function=(.*?)(?:</function>|$)|<tool_call>(?!\s*<function=)", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.S)
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_MISTRAL_CALL = re.compile(r"([^\[{\s]+)(?:\[CALL_ID\]([^\[]*))?(?:\[ARGS\])?\s*(.*)", re.S)
_READER = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_LLAMA_END = re.compile(r"<\|(?:eom_id|end_of_text)\|>\s*$")
_END = re.compile(r"<\|(?:end|call|return)\|>")
_JSON = json.JSONDecoder()
_JSON_OF = {"true": "true", "false": "false", "none": "null"}  # Qwen3-Coder's template writes values as Python does

Schemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """A tool call that a policy wrote.

    Attributes:
        name: Name of the tool; empty where the call cannot be read.
        arguments: Values by the names of parameters.
        problem: Reason why the call cannot be read, in words for the policy; empty where it can.
        id: Id that the policy gave the call, where its family does so; else empty.
    """

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    id: str = ""


@dataclass(frozen=True)
class ToolForm:
    """Form in which a family of models writes calls.

    Attributes:
        mark: Text with which a call begins, or may; a special token in the families that have it.
        calls: The calls in a turn, in their order. Given its text, in which the mark is not left out, and the schemas
            of the tools."""

    mark: str
    calls: Callable[[str, Schemas], list[ToolCall]]


def _hermes(text: str, schemas: Schemas) -> list[ToolCall]:
    return [_from_json(match.group(1), "arguments") for match in _HERMES.finditer(text)]


def _qwen3_coder(text: str, schemas: Schemas) -> list[ToolCall]:
    return [_from_xml(match.group(1), schemas) for match in _CODER.finditer(text)]


def _llama3(text: str, schemas: Schemas) -> list[ToolCall]:
    """A call is the whole turn; several are divided by `;`. An object without a name is an answer."""
    marked, text = "<|python_tag|>" in text, _LLAMA_END.sub("", text.rpartition("<|python_tag|>")[2]).strip()
    if not marked and not re.match(r'\{\s*"name"', text):
        return []
    calls = []
    while text:
        try:
            _, end = _JSON.raw_decode(text)
        except (ValueError, RecursionError):
            end = len(text)
        calls.append(_from_json(text[:end], "parameters"))
        text = text[end:].lstrip("; \n")
    return calls


def _mistral(text: str, schemas: Schemas) -> list[ToolCall]:
    calls = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        part = part.strip()
        calls += _mistral_list(part) if part.startswith(("[", "{")) or not part else [_mistral_named(part)]
    return calls


def _harmony(text: str, schemas: Schemas) -> list[ToolCall]:
    """Messages with a header, which names a channel and who reads it, before or behind the channel.

    A turn may think before, in `<|channel|>analysis<|message|>...<|end|><|start|>assistant`. The format:
    cookbook.openai.com/articles/openai-harmony.
    """
    calls = []
    for message in text.split("<|start|>"):
        header, written, body = message.partition("<|message|>")
        reader = _READER.search(header)
        if reader is None:
            continue
        name = reader.group(1).removeprefix(_FUNCTIONS)
        if not written:
            problem = "this tool call has no <|message|>, and its arguments come after one"
        elif not reader.group(1).startswith(_FUNCTIONS):
            problem = f"there is no `{name}` to write to; tools are called by to={_FUNCTIONS}NAME"
        elif not name:
            problem = f"this tool call names no tool; write to={_FUNCTIONS}NAME"
        else:
            calls.append(_from_arguments(name, _END.split(body, maxsplit=1)[0]))
            continue
        calls.append(ToolCall(name, {}, problem))
    return calls


TOOL_FORMS = {
    "hermes": ToolForm("<tool_call>", _hermes),
    "qwen3_coder": ToolForm("<function=", _qwen3_coder),
    "llama3": ToolForm("<|python_tag|>", _llama3),
    "mistral": ToolForm("[TOOL_CALLS]", _mistral),
    "harmony": ToolForm("<|channel|>", _harmony),
}


def _from_json(text: str, arguments: str) -> ToolCall:
    """The call in an object of a name and `arguments`, as the family calls them."""
    call, problem = _decoded(text, "this tool call is")
    return ToolCall("", {}, problem) if problem else _from_object(call, arguments)


def _decoded(text: str, what: str, more: bool = False) -> tuple[Any, str]:
    """The value of a JSON text, and its fault in words for the policy; empty if there is none.

    Args:
        text: The text.
        what: Beginning of the error, such as `this tool call is`.
        more: Whether more text may follow.
    """
    try:
        return _JSON.raw_decode(text)[0] if more else json.loads(text), ""
    except RecursionError:
        return None, "this tool call is nested too deeply"
    except ValueError as error:
        return None, f"{what} not JSON: {error}"


def _from_object(call: Any, arguments: str) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, f"a tool call is an object with `name` and `{arguments}`")
    given = call.get(arguments, {})
    if not isinstance(given, dict):
        return ToolCall(call["name"], {}, f"`{arguments}` of a tool call is an object of names and values")
    return ToolCall(call["name"], given)


def _from_arguments(name: str, arguments: str) -> ToolCall:
    """The call of a tool with the object of its arguments, as JSON."""
    given, problem = _decoded(arguments, f"the arguments of this call of {name} are")
    return ToolCall(name, {}, problem) if problem else _from_object({"name": name, "arguments": given}, "arguments")


def _from_xml(text: str | None, schemas: Schemas) -> ToolCall:
    """The call in the text between `<function=` and its end. A value is of its parameter's type, else a text."""
    name, closed, rest = (text or "").partition(">")
    if not closed or not name.strip():
        return ToolCall("", {}, "a tool call is <function=NAME><parameter=NAME>VALUE</parameter></function>")
    arguments: dict[str, Any] = {}
    for match in _PARAMETER.finditer(rest):
        parameter, value = match.group(1).strip(), match.group(2)
        kinds = _kinds(schemas, name.strip(), parameter)
        try:
            arguments[parameter] = value if "string" in kinds else json.loads(_JSON_OF.get(value.lower(), value))
        except (ValueError, RecursionError):
            return ToolCall(
                name.strip(), {}, f"`{parameter}` of this tool call is not of type {' or '.join(sorted(kinds))}"
            )
    return ToolCall(name.strip(), arguments)


def _kinds(schemas: Schemas, tool: str, parameter: str) -> set[str]:
    """The JSON types of a parameter; `string` where its schema names none."""
    for schema in schemas:
        function = schema["function"]
        if function["name"] == tool:
            said = function.get("parameters", {}).get("properties", {}).get(parameter, {})
            if not isinstance(said, Mapping):  # True allows any value
                break
            options = [each for each in said.get("anyOf", ()) if isinstance(each, Mapping)]
            kinds = [each.get("type") for each in options] or said.get("type") or "string"
            return {kinds} if isinstance(kinds, str) else {str(kind) for kind in kinds}
    return {"string"}


def _mistral_list(text: str) -> list[ToolCall]:
    """Calls as a list of objects."""
    found, problem = _decoded(text, "this tool call is", more=True)
    if problem:
        return [ToolCall("", {}, problem)]
    calls = found if isinstance(found, list) else [found]
    return [_identified(_from_object(call, "arguments"), call) for call in calls]


def _mistral_named(text: str) -> ToolCall:
    """A call as a name with its arguments behind."""
    match = _MISTRAL_CALL.match(text)
    if match is None:
        return ToolCall("", {}, "a tool call is [TOOL_CALLS]NAME[ARGS]{}")
    name, given, arguments = match.groups()
    found, problem = _decoded(arguments, f"the arguments of this call of {name} are", more=True)
    if problem:
        return ToolCall(name, {}, problem)
    return _identified(_from_object({"name": name, "arguments": found}, "arguments"), {"id": given})


def _identified(call: ToolCall, given: Any) -> ToolCall:
    """The call with the id of the object that it was read from, if the family's template takes such an id."""
    found = given.get("id") if isinstance(given, dict) else None
    return replace(call, id=found) if isinstance(found, str) and _MISTRAL_ID.fullmatch(found) else call
