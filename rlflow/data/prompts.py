"""What a user says of the prompts, and how a row of the dataset becomes token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from rlflow.data.sources import Source
from rlflow.errors import UserError, did_you_mean, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptData:
    """The datasets of a run and how their rows are read.

    Args:
        train: Rows to train on.
        validation: Rows to validate on; None for no validation.
        prompts_per_step: Prompts of one step, over all ranks. An epoch leaves out the rows that fill no step.
        prompt: Column of the prompt: a text, or with `chat_template` also a list of messages. Dots step into a column,
            as in `metadata.expression`.
        response: Column of the response to learn, a text; None where responses are sampled. Beside `rejected`, of the
            response that was chosen.
        rejected: Column of the response that was rejected, a text, for algorithms that read `Pairs`; None for others.
        chat_template: Write prompts in the tokenizer's chat template, as the user's message.
        system_prompt: System message before each prompt; needs `chat_template`.
        max_prompt_length: Longest prompt, in tokens.
        max_response_length: Longest response of the dataset, in tokens with the end-of-sequence token; None for any.
        overlong: What becomes of rows that are longer: stop with an error, or drop them before anything is dealt out.
        shuffle: Draw the rows in another order in every epoch.
    """

    def __init__(
        self,
        train: Source,
        validation: Source | None = None,
        prompts_per_step: int = 32,
        prompt: str = "question",
        response: str | None = None,
        rejected: str | None = None,
        chat_template: bool = False,
        system_prompt: str | None = None,
        max_prompt_length: int = 512,
        max_response_length: int | None = None,
        overlong: Literal["error", "drop"] = "error",
        shuffle: bool = True,
    ) -> None:
        if prompts_per_step < 1:
            raise UserError(f"`prompts_per_step` is {prompts_per_step}; a step needs at least 1 prompt. Raise it")
        for name, length in {
            "max_prompt_length": max_prompt_length,
            "max_response_length": max_response_length,
        }.items():
            if length is not None and length < 1:
                raise UserError(f"`data.{name}` is {length}; it counts tokens, so give 1 or more")
        if rejected is not None and response is None:
            raise UserError(
                f"`data.rejected` is {rejected!r} without `data.response`, the column of the response that was chosen;"
                " set both"
            )
        if system_prompt is not None and not chat_template:
            raise UserError(
                "`system_prompt` is set without `chat_template`, which writes it; set `chat_template: true`"
            )
        self.train = train
        self.validation = validation
        self.prompts_per_step = prompts_per_step
        self.prompt = prompt
        self.response = response
        self.rejected = rejected
        self.chat_template = chat_template
        self.system_prompt = system_prompt
        self.max_prompt_length = max_prompt_length
        self.max_response_length = max_response_length
        self.overlong = overlong
        self.shuffle = shuffle


@dataclass(frozen=True)
class Example:
    """One row in tokens; a response ends with the end-of-sequence token, and is empty without its column."""

    row: dict[str, Any]
    prompt_ids: list[int]
    response_ids: list[int]
    rejected_ids: list[int]


class Encoder:
    """Reads rows of a source as token ids.

    Prompt and response are encoded apart, so a prompt has the same tokens whether its response is learned or sampled.

    Args:
        data: The columns and the template.
        tokenizer: Of the model.

    Raises:
        UserError: The tokenizer lacks the chat template or end-of-sequence token that `data` needs.
    """

    def __init__(self, data: PromptData, tokenizer: PreTrainedTokenizerBase) -> None:
        if data.chat_template and tokenizer.chat_template is None:
            raise UserError("`data.chat_template` is true but the model's tokenizer has no template; set it to false")
        if data.response is not None and tokenizer.eos_token_id is None:
            raise UserError(
                f"`data.response` is {data.response!r}, but the model's tokenizer has no end-of-sequence token to end"
                " it with; set `eos_token` in its tokenizer_config.json"
            )
        self._data = data
        self._tokenizer = tokenizer

    def __call__(self, source: Source, rows: Sequence[int]) -> list[Example]:
        """The given rows of `source`, in that order.

        Raises:
            UserError: A row lacks a column, the column holds no text, or the two responses of a pair are one; the
                row's place is named.
        """
        if not rows:
            return []
        values = source.read(rows)
        places = [source.where(row) for row in rows]
        prompts = [self._prompt(value, place) for value, place in zip(values, places, strict=True)]
        # A template writes its own special tokens; before a plain prompt stand those that the tokenizer puts there.
        prompt_ids = self._tokenizer(prompts, add_special_tokens=not self._data.chat_template)["input_ids"]
        for ids, place in zip(prompt_ids, places, strict=True):
            if not ids:
                raise UserError(f"{place}: the prompt is empty, so nothing can follow it; remove the row")
        response_ids = self._response_ids(self._data.response, values, places)
        rejected_ids = self._response_ids(self._data.rejected, values, places)
        if self._data.rejected is not None:
            self._check_differ(response_ids, rejected_ids, places)
        return [Example(*parts) for parts in zip(values, prompt_ids, response_ids, rejected_ids, strict=True)]

    def tokens(self, text: str) -> list[int]:
        """The token ids of one prompt.

        Raises:
            UserError: It is empty.
        """
        prompt = self._chat(text, "a prompt that a node made") if self._data.chat_template else text
        ids: list[int] = self._tokenizer(prompt, add_special_tokens=not self._data.chat_template)["input_ids"]
        if not ids:
            raise UserError("a prompt that a node made is empty, so nothing can follow it; write something into it")
        return ids

    def _prompt(self, row: dict[str, Any], place: str) -> str:
        prompt = _column(row, self._data.prompt, place)
        if self._data.chat_template:
            return self._chat(prompt, place)
        if isinstance(prompt, list):
            raise UserError(
                f"{place}: column `{self._data.prompt}` is a list of messages; set `data.chat_template: true`"
            )
        return _text(prompt, self._data.prompt, place)

    def _chat(self, prompt: Any, place: str) -> str:
        from jinja2 import TemplateError

        messages = prompt
        if not isinstance(prompt, list):
            messages = [{"role": "user", "content": _text(prompt, self._data.prompt, place)}]
        if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
            raise UserError(
                f"{place}: column `{self._data.prompt}` is {prompt!r:.60}, not messages with role and content;"
                " mend or remove the row"
            )
        if self._data.system_prompt is not None:
            messages = [{"role": "system", "content": self._data.system_prompt}, *messages]
        try:
            chat = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:  # such as a template that knows no system role
            raise UserError(f"{place}: the model's chat template refuses the messages ({one_line(error)})") from error
        return cast(str, chat)

    def _response_ids(self, column: str | None, rows: list[dict[str, Any]], places: list[str]) -> list[list[int]]:
        if column is None:
            return [[] for _ in rows]
        texts = [_text(_column(row, column, place), column, place) for row, place in zip(rows, places, strict=True)]
        ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [[*response, self._tokenizer.eos_token_id] for response in ids]

    def _check_differ(self, chosen: list[list[int]], rejected: list[list[int]], places: list[str]) -> None:
        for one, other, place in zip(chosen, rejected, places, strict=True):
            if one == other:
                text = self._tokenizer.decode(one[:-1])
                raise UserError(
                    f"{place}: columns `{self._data.response}` and `{self._data.rejected}` are both {text!r:.60}, and a"
                    " pair is two responses; mend or remove the row"
                )


def _column(row: dict[str, Any], path: str, place: str) -> Any:
    """The column of that name, or the value at the dotted path."""
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        if not isinstance(value, dict) or step not in value:
            found = ", ".join(row)
            raise UserError(f"{place} has no column `{path}`; columns found: {found}.{did_you_mean(path, row)}")
        value = value[step]
    return value


def _text(value: Any, column: str, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: column `{column}` is {value!r:.60}, not a text; mend or remove the row")
    return value
