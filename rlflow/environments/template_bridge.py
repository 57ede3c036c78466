"""`TemplateBridge` writes the next turn by the tokenizer's chat template, and never tokenises earlier turns again.

Tokens of the policy stay as they were sampled. The template writes what the environment answers, and only the text that
it adds to the conversation is tokenised. This needs a stable template: new messages do not change the text of earlier
ones. Other templates are refused before the run, with the first token that differs. With a ChatML template:

    begin      <|im_start|>user\\n2 + 3?<|im_end|>\\n<|im_start|>assistant\\n
    sampled    5<|im_end|>
    after      \\n<|im_start|>user\\nAnd 4 more?<|im_end|>\\n<|im_start|>assistant\\n
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlflow.environments.bridge import Bridge, Message, ParsedTurn, SpecialTokens, date_for_template, message
from rlflow.environments.tool_calls import TOOL_FORMS, ToolCall, ToolForm
from rlflow.errors import UserError, did_you_mean, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPOKEN = "\u2603answer\u2603"  # stands for a policy's turn, to see what a template writes after it
BEGINS_CALL = re.compile(r"(<tool_call>| to=\S+)\s*$")  # before the mark: Qwen3-Coder's, gpt-oss's
CALL_ID = "000000000"  # of a call that has none, for templates that write ids; Mistral's take nine characters


class TemplateBridge(Bridge):
    """Writes and reads turns by a tokenizer's own chat template, which the constructor tries.

    Args:
        tokenizer: Tokenizer with a chat template.
        schemas: JSON schemas of the tools that the template describes to the policy. If there are any, a turn is
            answered by tools only; otherwise by messages of the environment.
        tool_calls: Name in `TOOL_FORMS` of the form in which the policy calls tools, such as `hermes`; None to take the
            form in which the template writes calls, or else a form that its description of the tools mentions.
        must_be_stable: Whether a template that is not stable is refused. If not, `rewrites` says for each turn whether
            it changes.

    Raises:
        UserError: There is no template, or it is not stable where it must be. It does not end a turn with a special
            token, it ignores `schemas`, or the form of calls is unknown.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[Mapping[str, Any]] = (),
        tool_calls: str | None = None,
        must_be_stable: bool = True,
    ) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "the model's tokenizer has no chat template, which writes the turns of an environment; set one, or"
                " `data.renderer`"
            )
        self._tokenizer = tokenizer
        self._special = SpecialTokens(tokenizer)
        self._schemas: list[Any] = [dict(schema) for schema in schemas]
        asked = [message("user", "?")]
        if self._schemas and self._written(asked) == self._written(asked, tools=False):
            raise UserError(
                f"the model's chat template does not show the policy its tools, so it cannot call"
                f" `{self._first_tool}`; take a model whose template does, or an environment that"
                " answers messages"
            )
        self.ends = tuple(dict.fromkeys([self._turn_end(), *self._call_end()]))
        self.form = _named(tool_calls) if tool_calls is not None else self._form_of_template()
        self._stable = True
        try:
            self._check_stable()
        except UserError:
            if must_be_stable or not self._repeats_what_it_reads():
                raise
            self._stable = False

    @property
    def _first_tool(self) -> str:
        name: str = self._schemas[0]["function"]["name"]
        return name

    def begin(self, messages: Sequence[Message]) -> list[int]:
        return self._special.ids(self._written(self._special.marked(messages), generate=True))

    def end_of(self, text: str) -> int:
        calls = self.form is not None and bool(self.form.calls(text, self._schemas))
        return self.ends[-1] if calls else self.end

    def after(self, new: Sequence[Message], spoken: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        if len(self.ends) > 1 and all(each["role"] == "tool" for each in new):
            ended = bool(spoken) and spoken[-1] in self.ends
            return [*([] if ended else self.ends[-1:]), *self._after_calls(self._special.marked(new))]
        known = [message("user", "?"), message("assistant", SPOKEN)]
        text = self._written([*known, *self._special.marked(new)], generate=True)
        ids = self._special.ids(text[text.index(SPOKEN) + len(SPOKEN) :])
        ended = bool(spoken) and spoken[-1] == self.end
        return ids[1:] if ended else ids  # they begin with the end of the turn

    def rewrites(self, before: Sequence[Message], spoken: Sequence[int], new: Sequence[Message]) -> bool:
        if self._stable:
            return False
        known, asked = self._special.marked(before), self._special.marked(before[:-1])
        whole = self._written([*known, *self._special.marked(new)], generate=True)
        if whole.startswith(self._written(asked, generate=True) + self._text(spoken, special=True)):
            return False
        rendered = self._written(known)
        return not (rendered.startswith(self._written(asked)) and whole.startswith(rendered))

    def plain(self, prompt: str | Sequence[int], begins: bool = True) -> list[int]:
        return self._special.plain(prompt, begins)

    def _after_calls(self, answers: Sequence[Message]) -> list[int]:
        """Token ids of tools' answers, and of the beginning of the next turn, after the token that ends a calling turn.

        Used where the template ends a turn that calls tools by another token than other turns. Each answer is written
        after a call of its own, from which the template takes the tool's name.
        """
        text = ""
        for number, each in enumerate(answers, start=1):
            name = each.get("name") or self._first_tool
            known = [message("user", "?"), _calling(ToolCall(name, {}))]
            before = self._written(known)
            text += self._written([*known, each], generate=number == len(answers)).removeprefix(before)
        return self._special.ids(text)

    def read(self, spoken: Sequence[int], before: Sequence[int] = ()) -> ParsedTurn:
        text = self._text(spoken)
        if self.form is None:
            return ParsedTurn(text, whole=text)
        marked = self._tokenizer.convert_tokens_to_ids(self.form.mark) in self._special.ids_of_all
        marked_text = self._text([each for each in spoken if each not in self.ends], special=True) if marked else text
        calls = tuple(self.form.calls(marked_text, self._schemas))
        return ParsedTurn(self._before_calls(marked_text) if calls else text, calls, text)

    def _before_calls(self, text: str) -> str:
        """The text of a turn before its first call; empty where calls have no mark, since they are then all of it."""
        assert self.form is not None
        said, mark, _ = text.partition(self.form.mark)
        return BEGINS_CALL.sub("", said).rstrip() if mark else ""

    def _form_of_template(self) -> ToolForm | None:
        """The form in which a call that the template writes can be read; else one whose mark the template mentions."""
        if not self._schemas:
            return None
        call = ToolCall(self._first_tool, {"text": "a b"})
        written = self._written_call(call).partition(self._text([self.end], special=True))[0]
        rendered = self._written([message("user", "?")])
        for form in TOOL_FORMS.values():
            if [(each.name, each.arguments) for each in form.calls(written, ())] == [(call.name, call.arguments)]:
                return form
        for form in sorted(TOOL_FORMS.values(), key=lambda form: form.mark == "<tool_call>"):  # which stands in two
            if form.mark in rendered:
                return form
        raise UserError(
            "the model's chat template calls tools in a form that is not known; name it by `data.tool_calls`, one of"
            f" {', '.join(TOOL_FORMS)}, or set `data.renderer`"
        )

    def _written_call(self, call: ToolCall) -> str:
        """Text of a turn that calls a tool and of its end, as the template writes it; empty where it refuses.

        For example `<tool_call>\\n{"name": "guess", "arguments": {"word": "a"}}\\n</tool_call><|im_end|>\\n`.
        """
        asked = [message("user", "?")]
        try:
            before, text = self._written(asked, generate=True), self._written([*asked, _calling(call)])
        except UserError:
            return ""
        return text.removeprefix(before)

    def _turn_end(self) -> int:
        text = self._written([message("user", "?"), message("assistant", SPOKEN)])
        rest = self._special.ids(text[text.index(SPOKEN) + len(SPOKEN) :]) if SPOKEN in text else []
        if not rest:
            raise UserError(
                "the model's chat template writes nothing after a turn of the policy, so no turn has an end; take"
                " a template that ends turns with a special token"
            )
        if rest[0] not in self._special.ids_of_all:
            token = self._tokenizer.convert_ids_to_tokens(rest[0])
            raise UserError(
                f"the model's chat template ends a turn of the policy with {token!r}, which is not a special token, so"
                " it cannot be distinguished from what the policy says; take a template that ends turns with one"
            )
        return rest[0]

    def _call_end(self) -> list[int]:
        """The token that ends a turn which calls a tool, if it is another one than ends other turns; else empty."""
        if not self._schemas:
            return []
        written = self._written_call(ToolCall(self._first_tool, {}))
        ids = [each for each in self._special.ids(written) if each in self._special.ids_of_all]
        return [] if self._turn_end() in ids else ids[-1:]

    def _check_stable(self) -> None:
        """Refuse a template that changes earlier text when messages of any kind are added, thoughts included."""
        for thought in ("", "<think>\ns\n</think>\n\n"):
            self._check_stable_after(thought + SPOKEN)

    def _check_stable_after(self, spoken: str) -> None:
        answer, turn = message("user", "and?"), message("assistant", spoken)
        if self._schemas:
            answer = message("tool", "4")
            turn = {**_calling(ToolCall(self._first_tool, {})), "content": spoken}
        whole = [message("system", "s"), message("user", "?"), turn]
        try:
            self._written(whole)
        except UserError:  # such as Gemma 2's, which knows no system role
            whole = whole[1:]
        for _ in range(2):
            before, after = self._written(whole), self._written([*whole, answer])
            if not after.startswith(before):
                raise UserError(self._differing(before, after))
            whole = [*whole, answer, turn]

    def _repeats_what_it_reads(self) -> bool:
        """Whether a turn that the template writes, when read and written again, is the same text."""
        asked = [message("user", "?")]
        written = self._written([*asked, message("assistant", SPOKEN)])
        turn = written.removeprefix(self._written(asked, generate=True)).partition(self._text([self.end], special=True))
        read = self.read(self._special.ids(turn[0])).text
        return self._written([*asked, message("assistant", read)]) == written

    def _differing(self, before: str, after: str) -> str:
        """Message of the error for an unstable template, with the first token that differs."""
        old, new = self._special.ids(before), self._special.ids(after)
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        was, now = (self._text(ids[at:], special=True)[:30] for ids in (old, new))
        return (
            f"the model's chat template changes earlier turns when a message comes: from token {at} on, {was!r}"
            f" becomes {now!r}, so the policy would read other tokens than it sampled; take a template that leaves"
            " earlier turns, or set `data.renderer` to the model's family"
        )

    def _written(self, messages: Sequence[Message], generate: bool = False, tools: bool = True) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [{"tool_call_id": CALL_ID, **each} if each["role"] == "tool" else each for each in messages],
                tools=(self._schemas or None) if tools else None,
                add_generation_prompt=generate,
                tokenize=False,
                **date_for_template(self._tokenizer),
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"the model's chat template refuses the messages ({one_line(error)}); correct the row,"
                " or take another template"
            ) from error
        assert isinstance(text, str)
        return text

    def _text(self, ids: Sequence[int], special: bool = False) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        assert isinstance(text, str)
        return text


def _named(name: str) -> ToolForm:
    if name not in TOOL_FORMS:
        raise UserError(
            f"`data.tool_calls` is {name!r}; give one of {', '.join(TOOL_FORMS)}, or null for what the model's chat"
            f" template writes.{did_you_mean(name, TOOL_FORMS)}"
        )
    return TOOL_FORMS[name]


def _calling(call: ToolCall) -> Message:
    """The message of a turn that calls a tool, in the form that chat templates take (OpenAI's `tool_calls`)."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return message("assistant", "", tool_calls=[{"id": CALL_ID, "type": "function", "function": function}])
