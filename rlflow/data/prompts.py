"""`PromptData`, the datasets of a run and their columns, and how a row becomes token ids."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from rlflow.data.mixture import Mixture
from rlflow.data.pictures import (
    MOST_IN_ROW,
    UnreadablePicture,
    picture_sources,
    read_picture,
    with_places,
    without_pictures,
)
from rlflow.data.scripted_conversations import ScriptedConversations
from rlflow.data.sources import DataLike, Source, as_source, datasets_of, is_data_module
from rlflow.data.template import write_template
from rlflow.dotted_path import column_of
from rlflow.environments.bridge import BRIDGES, MARK, Bridge, SpecialTokens, date_for_template, messages_of_prompt
from rlflow.environments.conversation_format import bridge_of, conversation_tokens
from rlflow.environments.environment import Definition, Environment, defined
from rlflow.errors import UserError, about, one_line, readable_line
from rlflow.models.picture_processor import FAMILIES, PictureProcessor
from rlflow.rewards.reward import PROMPTS
from rlflow.state.curriculum import Curriculum
from rlflow.values.picture import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Item = TypeVar("Item")
Learned = Literal["responses", "pairs"]  # what an algorithm learns from, where it is the dataset's
RESPONSES = ("response", "completion", "messages")  # columns of the response where none is named


class PromptData:
    """The datasets of a run and how their rows are read.

    Args:
        train: Rows to train on: the path of a JSON Lines or Parquet file, or of a folder of them; a dataset of the hub,
            such as `openai/gsm8k/main`; or a `Source`, by its class. In Python also a `datasets.Dataset`, a list of
            dicts, a map-style dataset of torch, or a `LightningDataModule`.
        validation: Rows to validate on, in the same forms; None for no validation.
        prompts_per_step: Number of prompts in one step, over all ranks. An epoch leaves out rows that do not fill a
            step.
        prompt: Column of the prompt, which is a text or a list of messages. None for the column `prompt`, or `question`
            if there is no `prompt`. Dots step into a column, as in `metadata.expression`.
        response: Column of the response to learn, a text. None for `response`, else `completion`, else `messages`; in
            algorithms that read `Pairs`, None for `chosen`; where responses are sampled, None for no column. With the
            chat template also a list of messages, whose turns of role `assistant` are learned. The list follows the
            prompt, or is a whole conversation, which begins with another role; then `prompt` is not read.
        rejected: Column of the rejected response, a text, for algorithms that read `Pairs`. None for `rejected` in
            these algorithms, and for no column in others.
        chat_template: Whether prompts are written in the tokenizer's chat template; a text becomes the user's message.
            None to use the template if the first row has a list of messages, or if `images` is set. A template that
            writes today's date always writes 26 July 2024, so that a run's prompts are the same on every day.
        system_prompt: System message before each prompt; needs the chat template.
        renderer: Renderer that writes conversations with environments in place of the chat template: the name of a
            renderer of the package `renderers`, such as `qwen3`; a mapping with its `name` and settings; or `auto`, to
            choose it by the package's table of models. Needs `pip install 'rlflow-llm[renderers]'`.
        tool_calls: The form in which the model calls tools: `hermes`, `qwen3_coder`, `llama3` or `mistral`. None for
            the form of its chat template.
        max_prompt_length: Longest prompt, in tokens, including the tools of a conversation. It also limits prompts that
            nodes and environments write.
        max_response_length: Longest response of the dataset, in tokens, the end-of-sequence token included; None for no
            limit.
        overlong_rows: Treatment of longer rows: stop with an error, or drop them before rows are distributed to ranks.
            Rows that are dropped must still have the columns that the reward reads. `drop` also drops rows with a
            image that cannot be read.
        shuffle: Draw the rows in another order in every epoch.
        images: Column of a row's image, or of a list of images, for a model that reads images: a path from the
            dataset's file, a `file:` or `data:` URL, bytes, or an image of Pillow or of `datasets`. None if messages
            have the images, as `{"type": "image", "image": PATH}`, or there are none. In a prompt that is a text,
            `<image>` marks the place of an image. Without this mark, images come first.
        curriculum: Rule for the prompts that an epoch draws, by the share of each prompt's samples that passed; None
            for all prompts. For algorithms that sample responses and score them.
        allow_remote: Whether images may be `http:` and `https:` URLs, which each rank downloads.
    """

    def __init__(
        self,
        train: DataLike,
        validation: DataLike | None = None,
        prompts_per_step: int = 32,
        prompt: str | None = None,
        response: str | None = None,
        rejected: str | None = None,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        renderer: str | dict[str, Any] | None = None,
        tool_calls: str | None = None,
        max_prompt_length: int = 512,
        max_response_length: int | None = None,
        overlong_rows: Literal["error", "drop"] = "error",
        shuffle: bool = True,
        images: str | None = None,
        curriculum: Curriculum | None = None,
        allow_remote: bool = False,
    ) -> None:
        if prompts_per_step < 1:
            raise UserError(f"`prompts_per_step` is {prompts_per_step}; a step needs at least 1 prompt. Raise it")
        for name, length in (("max_prompt_length", max_prompt_length), ("max_response_length", max_response_length)):
            if length is not None and length < 1:
                raise UserError(f"`data.{name}` is {length}; it counts tokens, so give 1 or more")
        if renderer is not None and tool_calls is not None:
            raise UserError(
                "`data.renderer` and `data.tool_calls` are set, and a renderer parses calls of tools itself; leave"
                " `tool_calls` out"
            )
        if is_data_module(train):
            train, of_module = datasets_of(train)
            validation = of_module if validation is None else validation
        self.train = as_source(train)
        self.validation = None if validation is None else as_source(validation, "data.validation", "validation")
        self.prompts_per_step = prompts_per_step
        self.prompt = prompt
        self.response = response
        self.rejected = rejected
        self.chat_template = chat_template
        self.system_prompt = system_prompt
        self.renderer = renderer
        self.tool_calls = tool_calls
        self.max_prompt_length = max_prompt_length
        self.max_response_length = max_response_length
        self.overlong_rows = overlong_rows
        self.shuffle = shuffle
        self.images = images
        self.curriculum = curriculum
        self.allow_remote = allow_remote

    def resolved(self, learned: Learned | None = None) -> Self:
        """A copy in which columns that were not set follow from the first row of `train` and the algorithm.

        Args:
            learned: Kind of the rows that the algorithm learns from; None where responses are sampled.

        Raises:
            UserError: There is no row, it lacks these columns, or a system prompt is set and no chat template.
        """
        with about(self.train):
            if not len(self.train):
                raise UserError(f"{self.train.name} has no rows, so there is nothing to train on; check the dataset")
            row, place = self.train.read([0])[0], self.train.where(0)
        found = copy.copy(self)
        if learned == "pairs":
            found.response = self.response or _first(row, ("chosen",), "response", place)
            found.rejected = self.rejected or _first(row, ("rejected",), "rejected", place)
        elif learned == "responses":
            found.response = self.response or _first(row, RESPONSES, "response", place)
        response = None if found.response is None else column_of(row, found.response, place)
        if self.prompt is None:
            # It is not read for whole conversations, except where they are held.
            absent = PROMPTS[0] if _is_whole(response) else None
            found.prompt = _first(row, PROMPTS, "prompt", place, absent)
        for name, source in (("train", self.train), ("validation", self.validation)):
            if isinstance(source, Mixture) and source.writes_prompts and found.prompt != PROMPTS[0]:
                raise UserError(
                    f"prompts are read from the column `{found.prompt}`, and a `template` or `prompt` in `data.{name}`"
                    " writes the column `prompt`; leave them out, or let all data have the column `prompt`"
                )
        if self.chat_template is None:
            prompt = None if _is_whole(response) else column_of(row, str(found.prompt), place)
            found.chat_template = isinstance(prompt, list) or isinstance(response, list) or self.images is not None
        if self.images is not None and not found.chat_template:
            raise UserError(
                f"`data.images` is {self.images!r} without `data.chat_template`, which writes the place of an image;"
                " set `data.chat_template: true`"
            )
        if self.system_prompt is not None and not found.chat_template:
            raise UserError(
                "`data.system_prompt` is set without `data.chat_template`, which writes it; set `data.chat_template:"
                " true`"
            )
        return found


@dataclass(frozen=True)
class Example:
    """One row in tokens; a response ends with the end-of-sequence token, and is empty without its column.

    Attributes:
        row: Row of the dataset, its columns by name.
        prompt_ids: Token ids of the prompt, in the chat template if there is one.
        response_ids: Token ids of the response to learn; for pairs, of the chosen one.
        rejected_ids: Token ids of the rejected response of a pair, else empty.
        written: For a response that is a conversation, True at tokens that the policy wrote; None where it wrote all.
        pictures: Number of pictures of the prompt; None where one cannot be read, in a row that will be dropped.
        picture_tokens: Tokens of the prompt that stand for pictures, beyond one of each.
    """

    row: dict[str, Any]
    prompt_ids: list[int]
    response_ids: list[int]
    rejected_ids: list[int]
    written: list[bool] | None = None
    pictures: int | None = 0
    picture_tokens: int = 0


class Encoder:
    """Reads rows of a source as token ids.

    Prompt and response are encoded separately, so a prompt has the same tokens whether its response is learned or
    sampled.

    Args:
        data: The columns and the template.
        tokenizer: Tokenizer of the model.
        environment: Environment with which conversations of the dataset were held, or will be from its prompts; the
            policy reads of its tools. None if there is none.
        processor: Processor of a model that reads pictures; None for one that reads text alone.

    Attributes:
        bridge: The bridge of an environment, which writes and reads its turns; those used last are kept.

    Raises:
        UserError: The tokenizer lacks the chat template or end-of-sequence token that `data` needs.
    """

    def __init__(
        self,
        data: PromptData,
        tokenizer: PreTrainedTokenizerBase,
        environment: Environment | None = None,
        processor: PictureProcessor | None = None,
    ) -> None:
        assert data.prompt is not None, "`PromptData.resolved` comes first"
        if data.chat_template and tokenizer.chat_template is None:
            raise UserError("`data.chat_template` is true but the model's tokenizer has no template; set it to false")
        if data.response is not None and tokenizer.eos_token_id is None:
            raise UserError(
                f"`data.response` is {data.response!r}, but the model's tokenizer has no end-of-sequence token to end"
                " it with; set `eos_token` in its tokenizer_config.json"
            )
        self._data = data
        self._prompt_column = data.prompt
        self._tokenizer = tokenizer
        self.processor = processor
        self._begins = environment is not None and data.response is None
        toolless = defined(None)
        self._definition_of = (lambda row: toolless) if environment is None else environment.definition_of
        self._special = SpecialTokens(tokenizer)
        made = partial(bridge_of, tokenizer=tokenizer, renderer=data.renderer, tool_calls=data.tool_calls)
        self.bridge: Callable[[Definition], Bridge] = lru_cache(BRIDGES)(made)
        for definition in environment.definitions.values() if environment is not None and self._begins else ():
            self.bridge(definition)

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
        if self._holds_conversations(values[0], places[0]):
            if isinstance(source, ScriptedConversations):
                for value in values:
                    source.require_form(self.bridge(self._definition_of(value)).form)
            return [self._conversation(value, place) for value, place in zip(values, places, strict=True)]
        shown = [
            self._shown(value, source.folder(row), place)
            for row, value, place in zip(rows, values, places, strict=True)
        ]
        values = [self.sent(value) for value in values]
        of_rows = zip(values, places, shown, strict=True)
        whole = [(row, place, pictures) for row, place, pictures in of_rows if pictures is not None]
        examples = iter(self._examples(whole))
        return [
            Example(value, [], [], [], pictures=None) if of_row is None else next(examples)
            for value, of_row in zip(values, shown, strict=True)
        ]

    def _examples(self, rows: Sequence[tuple[dict[str, Any], str, list[Picture]]]) -> list[Example]:
        """Examples of rows, each with its place and its pictures."""
        values, places, pictures = (
            [row for row, _, _ in rows],
            [place for _, place, _ in rows],
            [of for _, _, of in rows],
        )
        prompts = [
            self._prompt(value, place, pictures=len(shown))
            for value, place, shown in zip(values, places, pictures, strict=True)
        ]
        prompt_ids = self._prompt_ids(prompts, places, pictures)
        response_ids = self._response_ids(self._data.response, values, places)
        rejected_ids = self._response_ids(self._data.rejected, values, places)
        if self._data.rejected is not None:
            self._check_differ(response_ids, rejected_ids, places)
        parts = zip(values, prompt_ids, response_ids, rejected_ids, pictures, strict=True)
        return [
            Example(row, prompt, response, rejected, pictures=len(shown), picture_tokens=self._added(shown))
            for row, prompt, response, rejected, shown in parts
        ]

    def _added(self, pictures: Sequence[Picture]) -> int:
        return sum(len(self.processor.expansion(each)) - 1 for each in pictures) if self.processor is not None else 0

    def _shown(self, row: dict[str, Any], folder: Path | None, place: str) -> list[Picture] | None:
        """The pictures of a row; None where one cannot be read and such rows are dropped."""
        try:
            return self.pictures(row, folder, place)
        except UnreadablePicture:
            if self._data.overlong_rows == "error":
                raise
            return None

    def pictures(self, row: dict[str, Any], folder: Path | None, place: str) -> list[Picture]:
        """The pictures of a row's prompt, in the order of their places; only their headers are decoded.

        Args:
            row: Row of the dataset.
            folder: Folder from which its paths start.
            place: Place of the row, for errors.

        Raises:
            UnreadablePicture: A picture cannot be read.
            UserError: The model reads text alone, or the row has too many pictures.
        """
        sources = self._pictures_of(row, place)
        if sources and self.processor is None:
            raise UserError(
                f"{place} has an image, and the model reads text alone; take a model that reads images"
                f" ({', '.join(sorted(FAMILIES))}), or rows without images"
            )
        if len(sources) > MOST_IN_ROW:
            raise UserError(f"{place} has {len(sources)} images, and a row has at most {MOST_IN_ROW}; split the row")
        return [read_picture(each, folder, self._data.allow_remote, place) for each in sources]

    def picture_count(self, row: dict[str, Any], place: str) -> int:
        """Number of pictures of a row's prompt."""
        return len(self._pictures_of(row, place))

    def picture_names(self, row: dict[str, Any]) -> list[str]:
        """Names of a row's pictures: paths and URLs, and the beginning of a `data:` URL."""
        return [] if self.processor is None else [str(each) for each in self._pictures_of(row, "a row")]

    def _pictures_of(self, row: dict[str, Any], place: str) -> list[Any]:
        if self._data.images is None and self._prompt_column.split(".")[0] not in row:  # a whole conversation
            return []
        images = None if self._data.images is None else column_of(row, self._data.images, place)
        return picture_sources(column_of(row, self._prompt_column, place), images, place)

    def sent(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the dataset as ranks send it to one another: without the bytes of its pictures."""
        return row if self.processor is None else without_pictures(row, self._prompt_column, self._data.images)

    def tokens(self, text: str) -> list[int]:
        """The token ids of one prompt.

        Raises:
            UserError: It is empty.
        """
        place = "what a node made"
        return self._prompt_ids([self._chat(text, place) if self._data.chat_template else text], [place])[0]

    def messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of a row's prompt, the system's among them; a text is one of the user.

        Raises:
            UserError: The row lacks the column, or it holds neither a text nor messages.
        """
        prompt, pictures = column_of(row, self._prompt_column, "a row"), self.picture_count(row, "a row")
        return self._messages(with_places(prompt, pictures) if pictures else prompt, "a row")

    def begins(self, row: dict[str, Any]) -> int:
        """Tokens with which a conversation from this row's prompt begins, tools included; 0 without conversations.

        They do not include messages that the environment adds in `reset`, which are not known beforehand.

        Raises:
            UserError: The model's family cannot write the messages, the row names no environment, or it lacks a column
                that the environment's `reset` takes.
        """
        if not self._begins:
            return 0
        self._definition_of(row).given(row)
        return len(self.bridge(self._definition_of(row)).begin(self.messages(row)))

    def written(self, rows: Sequence[dict[str, Any]], template: str) -> list[list[int]]:
        """The token ids of prompts that a template writes from rows, in the chat template if the dataset's are.

        Where a prompt is a list of messages, `{prompt}` is what its last one of the user says, which it replaces.

        Raises:
            UserError: The template cannot be read, a row lacks one of its columns, or a prompt is longer than prompts
                may be.
        """
        places = [f"row {number} of those that a node writes prompts from" for number in range(len(rows))]
        prompts = [self._prompt(row, place, template) for row, place in zip(rows, places, strict=True)]
        if not prompts:
            return []
        ids = self._prompt_ids(prompts, places)
        for of_row, place in zip(ids, places, strict=True):
            if len(of_row) > self._data.max_prompt_length:
                raise UserError(
                    f"{place}: the prompt has {len(of_row)} tokens, and `data.max_prompt_length` is"
                    f" {self._data.max_prompt_length}, for which memory is planned; raise it, or write less"
                )
        return ids

    def _prompt_ids(
        self, prompts: list[str], places: list[str], pictures: Sequence[Sequence[Picture]] | None = None
    ) -> list[list[int]]:
        """Token ids of prompts: with the special tokens that a chat template wrote, else with the tokenizer's own.

        Pictures are expanded, see `PictureProcessor.expand`.
        """
        chat = self._data.chat_template
        found: list[list[int]] = self._tokenizer(prompts, add_special_tokens=not chat)["input_ids"]
        ids = [
            _at(place, self._special.ids, text) if chat and MARK in text else of
            for text, of, place in zip(prompts, found, places, strict=True)
        ]
        if self.processor is not None:
            of_rows = [()] * len(ids) if pictures is None else pictures
            expand, of_all = self.processor.expand, zip(ids, of_rows, places, strict=True)
            ids = [_at(place, expand, of, seen) for of, seen, place in of_all]
        if (empty := next((place for of, place in zip(ids, places, strict=True) if not of), None)) is not None:
            raise UserError(
                f"{empty}: the prompt is empty, so nothing can follow it; write something into it, or remove the row"
            )
        return ids

    def _prompt(self, row: dict[str, Any], place: str, template: str | None = None, pictures: int = 0) -> str:
        prompt = column_of(row, self._prompt_column, place)
        if isinstance(prompt, list) and not pictures and all(map(is_message, prompt)):
            prompt = _at(place, messages_of_prompt, prompt)
        if template is not None:
            prompt = self._rewritten(prompt, template, row, place)
        may_be_empty = not self._data.chat_template  # a tokenizer may begin it with a token of its own
        if self._data.system_prompt is None and says_nothing(prompt) and not (may_be_empty and prompt == ""):
            raise UserError(
                f"{place}: the prompt is {'blank' if prompt else 'empty'}, so nothing can follow it; write something"
                " into it, or remove the row"
            )
        if self._data.chat_template:
            if pictures and not isinstance(prompt, list):
                text_in(prompt, self._prompt_column, place)
            return self._chat(with_places(prompt, pictures) if pictures else prompt, place)
        if isinstance(prompt, list):
            raise UserError(
                f"{place}: column `{self._prompt_column}` is a list of messages; set `data.chat_template: true`"
            )
        return text_in(prompt, self._prompt_column, place)

    def _rewritten(self, prompt: Any, template: str, row: dict[str, Any], place: str) -> Any:
        """A prompt as the template writes it; of messages, what the user says last."""
        if not isinstance(prompt, list):
            return write_template(template, text_in(prompt, self._prompt_column, place), row, place)
        by_user = [number for number, message in enumerate(prompt) if message.get("role") == "user"]
        if not by_user:
            raise UserError(f"{place}: no message of the prompt is the user's, into which a template writes; add one")
        last = by_user[-1]
        text = write_template(template, text_in(prompt[last].get("content"), self._prompt_column, place), row, place)
        return [*prompt[:last], {**prompt[last], "content": text}, *prompt[last + 1 :]]

    def _chat(self, prompt: Any, place: str) -> str:
        from jinja2 import TemplateError

        try:
            chat = self._tokenizer.apply_chat_template(
                self._special.marked(self._messages(prompt, place)),
                add_generation_prompt=True,
                tokenize=False,
                **date_for_template(self._tokenizer),
            )
        except (TemplateError, TypeError, ValueError) as error:  # such as one that knows no system role
            raise UserError(
                f"{place}: the model's chat template refuses the messages ({one_line(error)});"
                " correct or remove the row"
            ) from error
        return cast(str, chat)

    def _messages(self, prompt: Any, place: str) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = prompt
        if not isinstance(prompt, list):
            messages = [{"role": "user", "content": text_in(prompt, self._prompt_column, place)}]
        if not all(map(is_message, messages)):
            raise UserError(
                f"{place}: column `{self._prompt_column}` is {prompt!r:.60}, not messages with role and content;"
                " correct or remove the row"
            )
        messages = _at(place, messages_of_prompt, messages)
        if self._data.system_prompt is not None:
            return [{"role": "system", "content": self._data.system_prompt}, *messages]
        return messages

    def _holds_conversations(self, row: dict[str, Any], place: str) -> bool:
        column = self._data.response
        return column is not None and self._data.rejected is None and isinstance(column_of(row, column, place), list)

    def _conversation(self, row: dict[str, Any], place: str) -> Example:
        """A row whose response is a whole conversation."""
        assert self._data.response is not None
        messages, where = column_of(row, self._data.response, place), f"{place}: column `{self._data.response}`"
        if not isinstance(messages, list):
            raise UserError(f"{where} is {messages!r:.60}, and in other rows a list of messages; make them alike")
        if not self._data.chat_template:
            raise UserError(f"{where} is a list of messages; set `data.chat_template: true`")
        if self._data.images is not None or self.picture_count(row, place):
            raise UserError(
                f"{where} is a list of messages to learn, and such rows can have no images; leave out `data.images`"
                " and images in the prompt"
            )
        bridge = self.bridge(self._definition_of(row))
        if _is_whole(messages):
            before, after = [], self._messages(messages, place)
        else:
            before, after = self._messages(column_of(row, self._prompt_column, place), place), messages
        prompt, tokens, written = conversation_tokens([*before, *after], bridge, self._ids, where, given=len(before))
        return Example(row, prompt, tokens, [], written)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _response_ids(self, column: str | None, rows: list[dict[str, Any]], places: list[str]) -> list[list[int]]:
        if column is None:
            return [[] for _ in rows]
        texts = [text_in(column_of(row, column, place), column, place) for row, place in zip(rows, places, strict=True)]
        ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [[*response, self._tokenizer.eos_token_id] for response in ids]

    def _check_differ(self, chosen: list[list[int]], rejected: list[list[int]], places: list[str]) -> None:
        for one, other, place in zip(chosen, rejected, places, strict=True):
            if one == other:
                text = self._tokenizer.decode(one[:-1])
                raise UserError(
                    f"{place}: columns `{self._data.response}` and `{self._data.rejected}` are both {text!r:.60}, and a"
                    " pair is two responses; correct or remove the row"
                )


def _first(row: dict[str, Any], columns: Sequence[str], what: str, place: str, absent: str | None = None) -> str:
    """The first of these columns that the row has, `absent` where it has none."""
    found = next((column for column in columns if column in row), absent)
    if found is None:
        wanted = " or ".join(f"`{column}`" for column in columns)
        there = ", ".join(readable_line(str(name)) for name in row)
        raise UserError(f"{place} has no column {wanted}; columns found: {there}. Name the column in `data.{what}`")
    return found


def _is_whole(response: Any) -> bool:
    """Whether a response is a whole conversation, which contains the prompt: its first message is not the policy's."""
    return isinstance(response, list) and not (
        bool(response) and is_message(response[0]) and response[0]["role"] == "assistant"
    )


def text_in(value: Any, column: str, place: str) -> str:
    """The value of a column, which is a text.

    Raises:
        UserError: It is none.
    """
    if not isinstance(value, str):
        raise UserError(f"{place}: column `{column}` is {value!r:.60}, not a text; correct or remove the row")
    return value


def is_message(message: Any) -> bool:
    """Whether it has a role and a content; the content may be null only if there are calls of tools."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        return False
    content = message["content"]
    return isinstance(content, str | list) or (content is None and bool(message.get("tool_calls")))


def says_nothing(prompt: Any) -> bool:
    """Whether a prompt, a text or messages, is only blanks; an empty list is reported elsewhere."""
    if isinstance(prompt, list):
        return bool(prompt) and all(is_message(each) and says_nothing(each["content"]) for each in prompt)
    return isinstance(prompt, str) and not prompt.strip()


def _at(place: str, read: Callable[..., list[Item]], *arguments: Any) -> list[Item]:
    """The result of `read`; errors name the row."""
    try:
        return read(*arguments)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
