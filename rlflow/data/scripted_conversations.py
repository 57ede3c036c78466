"""Conversations of a script with an environment, to teach a model turns and calls of tools."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from rlflow.data.sources import DataLike, Source, as_source
from rlflow.dotted_path import column_of, object_at
from rlflow.environments.bridge import Bridge, Message, ParsedTurn, message, messages_of_prompt
from rlflow.environments.environment import Environment
from rlflow.environments.session import Session
from rlflow.environments.tool_calls import TOOL_FORMS, ToolForm
from rlflow.errors import UserError, did_you_mean
from rlflow.rollout.conversation import Rules, converse
from rlflow.rollout.conversation_loop import run_alone
from rlflow.rollout.engine import Completion, GenerationRequest

Script = Callable[[Sequence[Message], Mapping[str, Any], random.Random], str]
ENDLESS = 2**62  # tokens: there is room for any script


class ScriptedConversations(Source):
    """A dataset of conversations with an environment, one for each row of another dataset; a function writes the turns.

    Its rows have an additional column `messages`, the whole conversation: for `response: messages`. They are made
    when they are first read, and end as conversations of a policy do.

    Args:
        rows: The dataset, in any form that `PromptData` takes.
        environment: Environment that answers; in training the module has one of the same tools.
        script: `script(messages, row, draws)`, or its dotted path. It returns the policy's next turn, with calls of
            tools as the model must write them. `draws` is a `random.Random` that follows from the seed and the row.
        prompt: Column of the first message, a text or a list of messages.
        seed: Seed of the script's random numbers.
        tool_calls: The form in which the script calls tools; it must be the model's in the run.
    """

    def __init__(
        self,
        rows: DataLike,
        environment: Environment,
        script: str | Script,
        prompt: str = "question",
        seed: int = 0,
        tool_calls: str = "hermes",
    ) -> None:
        if tool_calls not in TOOL_FORMS:
            raise UserError(
                f"`tool_calls` is {tool_calls!r}; give one of {', '.join(TOOL_FORMS)}."
                f"{did_you_mean(tool_calls, TOOL_FORMS)}"
            )
        self.rows = as_source(rows, "rows")
        self.name = f"{self.rows.name}, scripted"
        self.environment = environment
        self.script = script
        self.prompt = prompt
        self.seed = seed
        self.tool_calls = tool_calls
        self._made = cache(self._make)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._made(row)

    def require_form(self, form: ToolForm | None) -> None:
        """Refuse a script whose calls of tools could not teach a model that calls tools in this form.

        Raises:
            UserError: It calls them in another.
        """
        if form is not None and form is not TOOL_FORMS[self.tool_calls]:
            other = next(name for name, each in TOOL_FORMS.items() if each is form)
            raise UserError(
                f"the script calls tools in the form {self.tool_calls}, and the model in {other}; set `tool_calls` of"
                f" the dataset to {other}, and let the script write it"
            )

    @cached_property
    def _says(self) -> Script:
        return self.script if callable(self.script) else object_at(self.script, f"`script` is {self.script!r}")

    def _make(self, row: int) -> dict[str, Any]:
        of_row, draws = self.rows[row], random.Random(f"{self.seed}/{row}/script")
        asks = column_of(of_row, self.prompt, self.where(row))
        environment = self.environment
        definition = environment.definition_of(of_row)
        if definition.seats:
            raise UserError(
                f"{definition.path} has the seats {', '.join(definition.seats)}, and a script speaks for one; take an"
                " environment without seats"
            )
        host = environment.host()
        seed = random.Random(f"{self.seed}/{row}/environment").getrandbits(63)
        session = Session(definition, host, of_row, environment.max_tool_calls, seed)
        bridge = _TextBridge(TOOL_FORMS[self.tool_calls], definition.schemas)
        rules = Rules("script", environment.max_turns, ENDLESS, ENDLESS, ENDLESS)

        def take_turn(turn: GenerationRequest) -> Completion:
            ids = tuple(map(ord, self._says(bridge.messages, of_row, draws)))
            return Completion(ids, (0.0,) * len(ids), finished=True)

        try:
            prompt = [message("user", asks)] if isinstance(asks, str) else messages_of_prompt(asks)
            run_alone(converse(session, bridge, prompt, of_row, lambda turn: 0, rules), take_turn)
        except UserError as error:
            raise UserError(f"{self.where(row)}: {error}") from error
        finally:
            host.close()
        last = max(place for place, each in enumerate(bridge.messages) if each["role"] == "assistant")
        return {**of_row, "messages": bridge.messages[: last + 1]}


class _TextBridge(Bridge):
    """Bridge for turns whose "tokens" are the characters of a text: a dataset has no tokenizer.

    Attributes:
        messages: Messages of its one conversation so far.
    """

    ends = ()

    def __init__(self, form: ToolForm, schemas: Sequence[Mapping[str, Any]]) -> None:
        self.messages: list[Message] = []
        self._form = form
        self._schemas = schemas

    def begin(self, messages: Sequence[Message]) -> list[int]:
        self.messages = list(messages)
        return []

    def after(self, new: Sequence[Message], spoken: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        self.messages += new
        return []

    def plain(self, prompt: str | Sequence[int], begins: bool = True) -> list[int]:
        return list(map(ord, prompt)) if isinstance(prompt, str) else list(prompt)

    def read(self, spoken: Sequence[int], before: Sequence[int] = ()) -> ParsedTurn:
        text = "".join(map(chr, spoken))
        self.messages.append(message("assistant", text))
        return ParsedTurn(text, tuple(self._form.calls(text, self._schemas)), text)
