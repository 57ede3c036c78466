"""`Bridge` converts messages to tokens and back: it writes the turns of a conversation, and reads the policy's."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlflow.environments.tool_calls import ToolCall, ToolForm
from rlflow.errors import UserError
from rlflow.values.picture import Picture

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase


TODAY = datetime(2024, 7, 26)  # the date in Llama 3.2's template if none is given


def date_for_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The argument `strftime_now` for a chat template that writes today's date: always the same day.

    The tokens of a prompt then do not depend on the day on which a run begins or resumes.
    """
    return {"strftime_now": TODAY.strftime} if "strftime_now" in str(tokenizer.chat_template) else {}


@dataclass(frozen=True)
class ParsedTurn:
    """The content of a policy's turn.

    If the bridge distinguishes calls from text, a turn that is only a call is
    `ParsedTurn("", (ToolCall("guess", {"word": "a"}),), "<tool_call>...</tool_call>")`.

    Attributes:
        text: Text of the turn without special tokens. Thoughts and calls of tools are left out if the bridge can
            distinguish them.
        calls: Calls of tools, in order.
        whole: The whole text of the turn, without special tokens.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    whole: str = ""


class Bridge(ABC):
    """Writes and reads the turns of one environment's conversations. Sampled tokens are never changed.

    The tokens of a conversation are `begin(messages)`, then for each turn the tokens that the policy sampled, and
    `after(answer, sampled, before)`. In ChatML, `begin` ends with `<|im_start|>assistant` and a line end. After a turn
    that has its end token, `after` returns a line end, `<|im_start|>user`, the answer, `<|im_end|>`, and the beginning
    of the next turn.

    Attributes:
        ends: Ids of tokens that end a turn of the policy; the first of them is appended to a turn that was cut.
        form: Form in which calls of tools are read, one of `TOOL_FORMS`; None if a renderer reads them, or there are no
            tools.
        pictures: Pictures of the prompt, in the order of their places, see `PictureBridge`.
    """

    ends: tuple[int, ...]
    form: ToolForm | None = None
    pictures: Sequence[Picture] = ()

    @property
    def end(self) -> int:
        """Id of the token that is appended to a turn that was cut."""
        return self.ends[0]

    def end_of(self, text: str) -> int:
        """Id of the token that ends a turn with this text."""
        return self.end

    @abstractmethod
    def begin(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of the first turn.

        Raises:
            UserError: The model's family cannot write these messages.
        """

    @abstractmethod
    def after(self, new: Sequence[Message], spoken: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """The tokens after a turn: its end token if it was cut, the messages, and the beginning of the next turn.

        Args:
            new: Messages of the environment.
            spoken: Token ids of the policy's turn.
            before: Token ids of the conversation before the turn, the prompt included.

        Raises:
            UserError: The model's family cannot write these messages.
        """

    def rewrites(self, before: Sequence[Message], spoken: Sequence[int], new: Sequence[Message]) -> bool:
        """Whether the family writes earlier messages in another way when others follow, so that `after` cannot be used.

        Args:
            before: Messages before; the last is the policy's turn.
            spoken: Token ids of this turn.
            new: Messages that follow.
        """
        return False

    @abstractmethod
    def plain(self, prompt: str | Sequence[int], begins: bool = True) -> list[int]:
        """Token ids of a prompt without turns.

        Args:
            prompt: A text, in which spellings of special tokens are these tokens; or token ids.
            begins: Whether nothing is before a text, so that a tokenizer writes its first token there.

        Raises:
            UserError: The tokenizer has no such token.
        """

    @abstractmethod
    def read(self, spoken: Sequence[int], before: Sequence[int] = ()) -> ParsedTurn:
        """Parse the tokens of a policy's turn; `before` has the conversation's tokens before the turn."""


class PictureBridge(Bridge):
    """A bridge for one row of the dataset whose prompt has pictures: their places in it are expanded.

    Args:
        bridge: Bridge that writes and reads everything else.
        pictures: Pictures of the prompt, in the order of their places.
        expand: Function from ids with one placeholder for each picture, and the pictures, to a row's ids.
    """

    def __init__(
        self,
        bridge: Bridge,
        pictures: Sequence[Picture],
        expand: Callable[[Sequence[int], Sequence[Picture]], list[int]],
    ) -> None:
        self.ends, self.form, self.pictures = bridge.ends, bridge.form, pictures
        self._bridge = bridge
        self._expand = expand

    def end_of(self, text: str) -> int:
        return self._bridge.end_of(text)

    def begin(self, messages: Sequence[Message]) -> list[int]:
        return self._expand(self._bridge.begin(messages), self.pictures)

    def after(self, new: Sequence[Message], spoken: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        return self._bridge.after(new, spoken, before)

    def plain(self, prompt: str | Sequence[int], begins: bool = True) -> list[int]:
        return self._bridge.plain(prompt, begins)

    def read(self, spoken: Sequence[int], before: Sequence[int] = ()) -> ParsedTurn:
        return self._bridge.read(spoken, before)


Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def message(role: str, content: str, **more: Any) -> Message:
    """A message with a role and a text; `more` has its other keys."""
    return {"role": role, "content": content, **more}


def checked(given: Any, where: str) -> list[Message]:
    """Check the answer of an environment and return it as messages; a text becomes a user's message, None no message.

    The content of a message may be a list of parts, `{"type": "text", "text": ...}`; only text is read.

    Raises:
        UserError: The answer is neither a text nor messages, or has a role or a part that no template can write.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return [message("user", given)]
    messages = [given] if isinstance(given, Mapping) else given
    if not isinstance(messages, Sequence):
        raise UserError(f"{where} gave {given!r:.60}; give a text, or messages with `role` and `content`")
    return [_checked(each, where) for each in messages]


def _checked(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping) or not {"role", "content"} <= given.keys():
        raise UserError(f"{where} gave {given!r:.60} as a message; give a mapping with `role` and `content`")
    if given["role"] not in ROLES or given["role"] == "assistant":
        raise UserError(
            f"{where} gave a message of role {given['role']!r}, which an environment's message cannot have; give user,"
            " tool or system"
        )
    return {**given, "content": text_of(given["content"], where)}


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: the content itself, or the texts of its parts one after another."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(f"{where} gave a content of type {kind!r}, and only text is read; give parts of type text")
        if not isinstance(part.get("text"), str):
            raise UserError(f"{where} gave the part {part!r:.60}, which has no text; give it one under `text`")
    return "".join(part["text"] for part in parts)


PICTURE = {"type": "image"}  # a part of a message, as chat templates take it


def messages_of_prompt(messages: Sequence[Message]) -> list[Message]:
    """The messages of a prompt, the content of each a text, or parts where some are `PICTURE` and others texts.

    Raises:
        UserError: A part is something else.
    """
    return [{**each, "content": _content_of_prompt(each["content"])} for each in messages]


def _content_of_prompt(content: Any) -> str | list[dict[str, str]]:
    if content is None:  # of a turn that calls tools
        return ""
    if not isinstance(content, list) or PICTURE not in content:
        return text_of(content, "the prompt")
    return [part if part == PICTURE else {"type": "text", "text": text_of([part], "the prompt")} for part in content]


BRIDGES = 64  # kept at a time: an agent may define other tools in each request
MARK = "\ufdd0"  # no character: Unicode reserves this code point for internal use
MARKS = re.compile(f"{MARK}({MARK}?)")  # a single mark is inside a spelling; two marks stand for one in the message


class SpecialTokens:
    """Distinguishes special tokens that a template writes from spellings of them in messages, which become plain text.

    Otherwise an environment or a user could write `<|im_end|>` in a message, end the turn there, and continue in
    another role. `marked` puts marks into such spellings before a template writes the messages. `ids` then tokenises
    the template's text, and reads marked spellings as text.

    Args:
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: dict[str, AddedToken | None] = dict.fromkeys(map(str, tokenizer.all_special_tokens))
        self._tokens |= {str(token): token for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def ids_of_all(self) -> frozenset[int]:
        """Ids of all special tokens, also of those that the tokenizer does not recognise in a text."""
        return frozenset(self._id(token) for token in self._tokens)

    def plain(self, prompt: str | Sequence[int], begins: bool = True) -> list[int]:
        """See `Bridge.plain`."""
        if not isinstance(prompt, str):
            if wrong := next((id for id in prompt if not 0 <= id < len(self._tokenizer)), None):
                raise UserError(
                    f"there is no token {wrong} among the tokenizer's {len(self._tokenizer)}; give ids of"
                    " this tokenizer"
                )
            return list(prompt)
        ids: list[int] = self._tokenizer(prompt, add_special_tokens=begins)["input_ids"]
        return ids

    def marked(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with marks in each spelling of a special token; turns of the policy are unchanged."""
        return [self._marked(each) for each in messages]

    def ids(self, text: str) -> list[int]:
        """Token ids of a text that a template wrote.

        Raises:
            UserError: A special token is spelled in a message, and this tokenizer cannot write it as text.
        """
        if MARK not in text:
            return self.plain(text, begins=False)
        parts = list(self._parts(text))
        # The text around spellings must become the same tokens as without spellings.
        plain = [(token, self._spelled.sub(MARK, part)) for token, part in parts]
        if self._of_parts(plain) != self.plain("".join(token or part for token, part in plain), begins=False):
            said = "\n".join(part for _, part in parts)
            spelled = next(iter(self._spelled.findall(said)), MARK)
            raise UserError(
                f"a message spells the special token {spelled}, and the model's tokenizer cannot write it as text;"
                " remove it from the data or from the environment's messages"
            )
        return self._of_parts(parts)

    def _marked(self, each: Message) -> Message:
        if each["role"] == "assistant":
            return each
        return {key: value if key == "role" else self._with_marks(value) for key, value in each.items()}

    def _with_marks(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._with_marks(each) for each in value]
        if isinstance(value, dict):
            return {key: self._with_marks(each) for key, each in value.items()}
        if not isinstance(value, str):
            return value
        return self._spelled.sub(lambda match: MARK.join(match.group()), value.replace(MARK, MARK * 2))

    def _parts(self, text: str) -> Iterator[tuple[str, str]]:
        """Pairs of token and text: a special token of the template and "", or "" and a text between them, unmarked."""
        place = 0
        for match in self._spelled.finditer(text):
            yield "", MARKS.sub(r"\1", text[place : match.start()])
            yield match.group(), ""
            place = match.end()
        yield "", MARKS.sub(r"\1", text[place:])

    def _of_parts(self, parts: Sequence[tuple[str, str]]) -> list[int]:
        ids: list[int] = []
        for number, (token, part) in enumerate(parts):
            if token:
                ids.append(self._id(token))
                continue
            before = self._tokens.get(parts[number - 1][0]) if number else None
            after = self._tokens.get(parts[number + 1][0]) if number + 1 < len(parts) else None
            part = part.lstrip() if before is not None and before.rstrip else part
            part = part.rstrip() if after is not None and after.lstrip else part
            ids += self._splitting(part, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def _id(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int), token
        return found

    @cached_property
    def _splitting(self) -> Any:
        """A copy of the tokenizer: how it reads special tokens is part of its state, and other threads use it."""
        return deepcopy(self._tokenizer)


class MarkedTokenizer:
    """A tokenizer for renderers of the package `renderers` that can read marked messages.

    Args:
        tokenizer: Tokenizer of the model, which does everything but encode texts with marks.
        special: Special tokens of the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._special = special

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **how: Any) -> list[int]:
        """Token ids of a text, which may have marks."""
        ids: list[int] = self._special.ids(text) if MARK in text else self._tokenizer.encode(text, **how)
        return ids

    def __call__(self, text: str, **how: Any) -> Any:
        """Token ids and their offsets in the text; for a text with marks, offsets are 0, since renderers need none."""
        if MARK not in text:
            return self._tokenizer(text, **how)
        ids = self._special.ids(text)
        return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids)}
