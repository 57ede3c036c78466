"""`ConversationFormat`: how a run's model writes conversations, and the messages of the dataset's prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlflow.environments.bridge import ROLES, Bridge, Message, message, text_of
from rlflow.environments.environment import Definition
from rlflow.environments.renderer_bridge import RendererBridge, RendererName
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Bridges:
    """What writes and reads turns, for each environment of a run.

    Attributes:
        tokenizer: Tokenizer of the model.
        renderer: As of `data.renderer`; None for the model's chat template.
        tool_calls: As of `data.tool_calls`.
    """

    tokenizer: PreTrainedTokenizerBase
    renderer: RendererName | None = None
    tool_calls: str | None = None
    _made: dict[Definition, Bridge] = field(default_factory=dict)

    def of(self, definition: Definition) -> Bridge:
        """The bridge of an environment; made once.

        Raises:
            UserError: The model's template, or the renderer, cannot write its turns.
        """
        if definition not in self._made:
            self._made[definition] = self._bridge(definition)
        return self._made[definition]

    def _bridge(self, definition: Definition) -> Bridge:
        if self.renderer is None:
            return TemplateBridge(self.tokenizer, definition.schemas, self.tool_calls)
        answer = "user" if definition.answers_messages else "tool"
        return RendererBridge(self.tokenizer, self.renderer, definition.schemas, answer)


@dataclass(frozen=True)
class ConversationFormat:
    """How a run's model writes conversations.

    Attributes:
        bridges: Write its turns.
        messages: Messages of a row of the dataset, those of its prompt.
        longest_prompt: Tokens of a conversation's first prompt, at most.
    """

    bridges: Bridges
    messages: Callable[[dict[str, Any]], Sequence[Message]]
    longest_prompt: int

    def bridge(self, definition: Definition) -> Bridge:
        """Writes the turns of an environment."""
        return self.bridges.of(definition)


@dataclass(frozen=True)
class TracedTokens:
    """A conversation that was written down, in tokens.

    Attributes:
        prompt: Ids of what comes before the first turn of the policy.
        tokens: Ids of the rest.
        written: Whether the policy wrote each of these: its turns are, with the token that ends each.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)

    def add(self, ids: Sequence[int], written: bool) -> None:
        """Let more tokens follow."""
        self.tokens.extend(ids)
        self.written.extend([written] * len(ids))


def traced(
    messages: Sequence[Any], bridge: Bridge, ids_of: Callable[[str], list[int]], place: str, given: int = 0
) -> TracedTokens:
    """The tokens that a policy with the same words would have sampled and read.

    Args:
        messages: Those of the prompt; then turns of role `assistant`, whose content holds calls of tools as the model
            is to write them, and between them what answers.
        bridge: Writes turns.
        ids_of: Gives the ids of a turn's text.
        place: What errors call the messages.
        given: How many of the first are the prompt, turns of `assistant` among them too.

    Raises:
        UserError: They are no turns of a policy with answers between them.
    """
    read = [_read(each, place) for each in messages]
    turns = [number for number, each in enumerate(read) if each["role"] == "assistant" and number >= given]
    if not turns or turns[0] == 0 or turns[-1] != len(read) - 1:
        raise UserError(
            f"{place} has the roles {', '.join(each['role'] for each in read) or 'of nobody'}; a conversation to learn"
            " from begins with a prompt and ends with a turn of `assistant`. Mend or remove the row"
        )
    trace = TracedTokens(bridge.begin(read[: turns[0]]))
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        spoken = [*ids_of(read[turn]["content"]), bridge.end_of(read[turn]["content"])]
        before = trace.prompt + trace.tokens
        trace.add(spoken, written=True)
        if following is None:
            break
        if following == turn + 1:
            raise UserError(f"{place} has two turns of `assistant` that nothing answers between; join them")
        trace.add(bridge.after(read[turn + 1 : following], spoken, before), written=False)
    return trace


def _read(given: Any, place: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ROLES or "content" not in given:
        raise UserError(f"{place} has {given!r:.60}, not a message with a role and content; mend or remove the row")
    if given.get("tool_calls"):
        raise UserError(
            f"{place} has a message with `tool_calls`; write the calls into its content, as the model is to write them"
        )
    return {**message(given["role"], ""), **given, "content": text_of(given["content"], place)}
