"""`RendererBridge`: turns written and read by a renderer of the package `renderers`, made for the model's family.

A renderer writes messages as tokens without a chat template, continues after the tokens that were sampled, and parses
calls of tools from tokens. It is for families whose chat template changes the text of earlier turns, such as thinking
models. The package: github.com/PrimeIntellect-ai/renderers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlflow.environments.bridge import TODAY, Bridge, MarkedTokenizer, Message, ParsedTurn, SpecialTokens, message
from rlflow.environments.tool_calls import ToolCall
from rlflow.errors import UserError, one_line, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RendererName = str | Mapping[str, Any]  # and settings

PROBLEMS = {
    "invalid_json": "this tool call is not JSON",
    "unclosed_block": "this tool call has no end",
    "missing_name": "this tool call names no tool",
    "malformed_structure": "this tool call cannot be read",
}
# Turns where the prompt begins a thought, which a turn has to end; the second is of gpt-oss.
AFTER_THOUGHTS = "</think>a", "<|end|><|start|>assistant<|channel|>final<|message|>a"
HARMONY = "gpt-oss"
HARMONY_VOCABULARY = "TIKTOKEN_ENCODINGS_BASE"  # where openai_harmony finds its vocabulary; else it downloads it


class RendererBridge(Bridge):
    """Writes and reads turns by a renderer of the package `renderers`, without access to the network.

    Args:
        tokenizer: Tokenizer of the model.
        renderer: Name of the renderer, such as `qwen3`; or its name and settings, such as
            `{"name": "qwen3", "thinking_retention": "all"}`. `auto` takes the renderer that the package lists for the
            model's name.
        schemas: JSON schemas of the tools that are described to the policy.
        answer: Role of the messages by which the environment answers, `user` or `tool`; the constructor tries one.

    Raises:
        UserError: The package or the renderer is not installed, or the tokenizer is of another family. Or the renderer
            changes earlier turns when a message of the role `answer` follows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renderer: RendererName,
        schemas: Sequence[Mapping[str, Any]] = (),
        answer: str = "user",
    ) -> None:
        self._tokenizer = tokenizer
        self._tools: list[Any] | None = [dict(schema) for schema in schemas] or None
        self._special_tokens = SpecialTokens(tokenizer)
        self._name, self._renderer = _made(MarkedTokenizer(tokenizer, self._special_tokens), renderer)
        # openai_harmony has a vocabulary of its own, and writes texts as text.
        self._marked = list if self._name == HARMONY else self._special_tokens.marked
        self._special = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens))
        self._prompt = self.begin([message("user", "?")])
        self.ends = tuple(self._renderer.get_stop_token_ids())
        self._check_can_continue(answer)

    def begin(self, messages: Sequence[Message]) -> list[int]:
        try:
            marked = self._marked(messages)
            ids: list[int] = self._renderer.render_ids(marked, tools=self._tools, add_generation_prompt=True)
        except (ValueError, TypeError, AssertionError, KeyError) as error:
            raise UserError(
                f"the renderer `{self._name}` cannot write the messages ({one_line(error)});"
                " name another in `data.renderer`, or correct the row"
            ) from error
        return ids

    def after(self, new: Sequence[Message], spoken: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        ids = self._bridged(before, spoken, new)
        if ids is None:
            # What was sampled cannot be parsed, such as a turn that ended inside a thought. It stays; what follows
            # it is what would follow another turn that ended, or was cut, like it.
            ended = bool(spoken) and spoken[-1] in self.ends
            ids = self._bridged(self._prompt, [*self._word, *spoken[-1:]] if ended else self._word, new)
        if ids is None:
            raise UserError(
                f"the renderer `{self._name}` cannot continue with messages of role"
                f" {' and '.join(dict.fromkeys(each['role'] for each in new)) or 'none'}; an environment answers with"
                " messages of the user or of tools"
            )
        return ids

    def end_of(self, text: str) -> int:
        calls = self.read(self._tokenizer.encode(text, add_special_tokens=False), self._prompt).calls
        return self._call_end if calls else self.end

    @cached_property
    def _call_end(self) -> int:
        """The token that ends a turn which calls a tool: the first of `ends` that is written before a tool answers."""
        name = self._tools[0]["function"]["name"] if self._tools else "f"
        call = {"id": "0", "type": "function", "function": {"name": name, "arguments": {}}}
        asked = [message("user", "?")]
        result = message("tool", "?", name=name, tool_call_id="0")
        answered = [*asked, message("assistant", "", tool_calls=[call]), result]
        before, whole = (self._renderer.render_ids(each, tools=self._tools) for each in (asked, answered))
        return next((each for each in whole[len(before) :] if each in self.ends), self.end)

    def plain(self, prompt: str | Sequence[int], begins: bool = True) -> list[int]:
        return self._special_tokens.plain(prompt, begins)

    def read(self, spoken: Sequence[int], before: Sequence[int] = ()) -> ParsedTurn:
        whole = str(self._tokenizer.decode(list(spoken), skip_special_tokens=True))
        try:
            parsed = self._renderer.parse_response(list(spoken), tools=self._tools, prompt_ids=list(before) or None)
        except (RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
            # A policy may sample anything, and not every parser awaits it.
            problem = f"this tool call cannot be read: {type(error).__name__}"
            return ParsedTurn(whole, (ToolCall("", {}, problem),), whole)
        text = self._special.sub("", parsed.content)  # which a policy may sample anywhere
        return ParsedTurn(text, tuple(_call(each) for each in parsed.tool_calls), whole)

    def _check_can_continue(self, role: str) -> None:
        """Try a message after a turn that ended, and after one that was cut, and put the token that closes it first.

        Raises:
            UserError: The renderer cannot continue after such turns without changing their tokens.
        """
        named = {"name": self._tools[0]["function"]["name"]} if self._tools and role == "tool" else {}
        new = [message(role, "?", **named)]
        closed = None
        for text in ("a", *AFTER_THOUGHTS):
            self._word = [int(each) for each in self._tokenizer.encode(text, add_special_tokens=False)]
            if self._bridged(self._prompt, [*self._word, self.ends[0]], new) is not None:
                closed = self._bridged(self._prompt, self._word, new)
                break
        if closed is None:
            raise UserError(
                f"the renderer `{self._name}` changes earlier turns when a message of role {role} comes, so the"
                " policy would read other tokens than it sampled; "
                + (
                    "name the renderer of the model's family, or leave `data.renderer` out"
                    if self._name == "default"
                    else "set `thinking_retention: all` next to its `name`, which leaves thoughts where they are"
                )
            )
        first = next((each for each in closed if each in self.ends), self.ends[0])
        self.ends = (first, *(each for each in self.ends if each != first))

    def _bridged(self, before: Sequence[int], spoken: Sequence[int], new: Sequence[Message]) -> list[int] | None:
        """Token ids that follow a turn, see `after`; None where the renderer would change the tokens before them."""
        bridged = self._renderer.bridge_to_next_turn(list(before), list(spoken), self._marked(new), tools=self._tools)
        known = [*before, *spoken]
        if bridged is None or bridged.token_ids[: len(known)] != known:
            return None
        return list(bridged.token_ids[len(known) :])


def _made(tokenizer: Any, named: RendererName) -> tuple[str, Any]:
    """Construct a renderer, and return it after its name: `qwen3`, for example, where `named` is `auto`."""
    require("renderers", "`data.renderer`", "renderers")
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    given = {"name": named} if isinstance(named, str) else dict(named)
    name = given.pop("name", None)
    if name == "auto":
        name = MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
        if name is None:
            raise UserError(
                f"`data.renderer` is auto, and renderers' table has no model {tokenizer.name_or_path!r}; name the"
                " renderer of its family, such as qwen3"
            )
    try:
        settings: Any = type(config_from_name(str(name)))
    except ValueError as error:  # which lists those that there are
        raise UserError(f"`data.renderer` is {named!r}: {one_line(error)}; name one of these") from error
    if name == HARMONY and not os.environ.get(HARMONY_VOCABULARY):
        raise UserError(
            f"the renderer `gpt-oss` reads OpenAI's vocabulary from the folder that {HARMONY_VOCABULARY} names, and"
            " would download it without; put o200k_base.tiktoken into a folder and set the variable"
        )
    if name == HARMONY:
        given.setdefault("conversation_start_date", TODAY.date().isoformat())
    try:
        return str(name), create_renderer(tokenizer, settings(**given))
    except AssertionError as error:  # the tokenizer lacks a token of the family
        raise UserError(
            f"the renderer `{name}` does not fit the model's tokenizer ({one_line(error)}); name that of its family"
        ) from error
    except ValueError as error:
        raise UserError(f"`data.renderer` is {named!r}: {one_line(error)}; correct its settings") from error


def _call(parsed: Any) -> ToolCall:
    """Convert a call that the renderer parsed; its problem, if it has one, is in words for the policy."""
    name = parsed.name if isinstance(parsed.name, str) else ""
    if problem := PROBLEMS.get(str(parsed.status), ""):
        return ToolCall(name, {}, problem)
    arguments = parsed.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(name, {}, PROBLEMS["invalid_json"])
    if not name:
        return ToolCall("", {}, PROBLEMS["missing_name"])
    if not isinstance(arguments or {}, dict):
        return ToolCall(name, {}, "the arguments of a tool call are an object of names and values")
    return ToolCall(name, arguments or {}, id=parsed.id or "")
