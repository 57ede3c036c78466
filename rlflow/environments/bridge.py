"""Between messages and tokens: `Bridge` writes the turns of a conversation, and reads those of the policy."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlflow.environments.tool_calls import ToolCall, ToolForm
from rlflow.errors import UserError

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ParsedTurn:
    """What a policy said in a turn.

    A turn that is a call alone is `ParsedTurn("", (ToolCall("guess", {"word": "a"}),), "<tool_call>...</tool_call>")`
    where the bridge tells calls from text.

    Attributes:
        text: Text of the turn without special tokens; if the bridge can distinguish them, without thoughts and calls of
            tools.
        calls: Calls of tools, in their order.
        whole: All of its text, without special tokens.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    whole: str = ""


class Bridge(ABC):
    """Writes and reads the turns of one environment's conversations. Tokens that were sampled stay as they are.

    The tokens of a conversation are `begin(messages)`, then for each turn what the policy sampled and
    `after(answer, sampled, before)`. In ChatML, `begin` ends with `<|im_start|>assistant` and a line end. After a turn
    that ended itself, `after` gives a line end, `<|im_start|>user`, the answer, `<|im_end|>`, and the beginning of the
    next turn.

    Attributes:
        ends: Tokens that end a turn of the policy; the first of them is the one that closes a turn which was cut.
        form: Form in which calls of tools are read, one of `TOOL_FORMS`; None where a renderer reads them, or there are
            no tools.
    """

    ends: tuple[int, ...]
    form: ToolForm | None = None

    @property
    def end(self) -> int:
        """The token that ends a turn."""
        return self.ends[0]

    def end_of(self, text: str) -> int:
        """The token that ends a turn which says this."""
        return self.end

    @abstractmethod
    def begin(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of the first turn.

        Raises:
            UserError: The model's family cannot write these messages.
        """

    @abstractmethod
    def after(self, new: Sequence[Message], spoken: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """What follows the tokens of a turn: its end if it was cut, the messages, and the beginning of the next turn.

        Args:
            new: Messages of the environment.
            spoken: Ids of the policy's turn.
            before: Ids of all that stood before the turn, the prompt among it.

        Raises:
            UserError: The model's family cannot write these messages.
        """

    @abstractmethod
    def read(self, spoken: Sequence[int], before: Sequence[int] = ()) -> ParsedTurn:
        """What the policy said, from the tokens of its turn; `before` has all tokens before it."""


Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def message(role: str, content: str, **more: Any) -> Message:
    """A message of a text."""
    return {"role": role, "content": content, **more}


def checked(given: Any, where: str) -> list[Message]:
    """What an environment gave, as messages: a text is one of the user's; None is none.

    A content may be a list of parts, `{"type": "text", "text": ...}`; only text is read.

    Raises:
        UserError: It is neither, or has a role or a part that no template can write.
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
            f"{where} gave a message of role {given['role']!r}; an environment speaks as user, tool or system"
        )
    return {**given, "content": text_of(given["content"], where)}


def text_of(content: Any, where: str) -> str:
    """The text of a content: itself, or that of its parts, one after another."""
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


MARK = "\ufdd0"  # no character: Unicode keeps this code point for uses like this one
MARKS = re.compile(f"{MARK}({MARK}?)")  # one stands in a spelling, two stand for one that was said


class SpecialTokens:
    """Distinguishes special tokens that a template writes from those that are spelled in messages, which become text.

    Else an environment, or a user, who says `<|im_end|>` would end its turn there, and could speak in another role.
    Messages are marked before a template writes them, and its text is tokenised as `ids` says.

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
        """Their ids, those among them that the tokenizer gives no part in a text."""
        return frozenset(self._id(token) for token in self._tokens)

    def marked(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with a mark in each spelling, whose text `ids` reads. Turns of the policy stay as they are."""
        return [self._marked(each) for each in messages]

    def ids(self, text: str) -> list[int]:
        """Token ids of what a template wrote.

        Raises:
            UserError: A special token is spelled in a message, and this tokenizer cannot write it as text.
        """
        if MARK not in text:
            return self._whole(text)
        parts = list(self._parts(text))
        # What stands around spellings has to become the same tokens as ever.
        plain = [(token, self._spelled.sub(MARK, part)) for token, part in parts]
        if self._of_parts(plain) != self._whole("".join(token or part for token, part in plain)):
            said = "\n".join(part for _, part in parts)
            spelled = next(iter(self._spelled.findall(said)), MARK)
            raise UserError(
                f"a message spells the special token {spelled}, and the model's tokenizer cannot write it as text;"
                " take it out of the data or of what the environment says"
            )
        return self._of_parts(parts)

    def _marked(self, each: Message) -> Message:
        if each["role"] == "assistant":
            return each
        return {key: value if key == "role" else self._with_marks(value) for key, value in each.items()}

    def _with_marks(self, text: Any) -> Any:
        if isinstance(text, list):  # of parts
            return [{**each, "text": self._with_marks(each["text"])} if "text" in each else each for each in text]
        if not isinstance(text, str):
            return text
        return self._spelled.sub(lambda match: MARK.join(match.group()), text.replace(MARK, MARK * 2))

    def _parts(self, text: str) -> Iterator[tuple[str, str]]:
        """Special tokens of the template, each with no text; and, with no token, the texts between them, unmarked."""
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

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _id(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int), token
        return found

    @cached_property
    def _splitting(self) -> Any:
        """A tokenizer of its own: how special tokens are read is a state of it, which another thread may need."""
        return deepcopy(self._tokenizer)


class MarkedTokenizer:
    """A tokenizer as renderers of the package `renderers` use it, that reads marked messages.

    Args:
        tokenizer: Tokenizer of the model; all that is not of texts is its.
        special: Special tokens of the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._special = special

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **how: Any) -> list[int]:
        """Token ids."""
        ids: list[int] = self._special.ids(text) if MARK in text else self._tokenizer.encode(text, **how)
        return ids

    def __call__(self, text: str, **how: Any) -> Any:
        """Token ids and where they are in the text; of a marked text nowhere, which renderers need for no token."""
        if MARK not in text:
            return self._tokenizer(text, **how)
        ids = self._special.ids(text)
        return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids)}
