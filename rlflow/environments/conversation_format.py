"""`ConversationFormat`: how a run's model writes conversations, and the messages of the dataset's prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlflow.environments.bridge import Bridge
from rlflow.environments.definition import Definition
from rlflow.environments.messages import Message
from rlflow.environments.renderer_bridge import RendererBridge, RendererName
from rlflow.environments.template_bridge import TemplateBridge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Bridges:
    """What writes and reads turns, for each environment of a run.

    Attributes:
        tokenizer: Of the model.
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
        messages: Of a row of the dataset, those of its prompt.
        longest_prompt: Tokens of a conversation's first prompt, at most.
    """

    bridges: Bridges
    messages: Callable[[dict[str, Any]], Sequence[Message]]
    longest_prompt: int

    def bridge(self, definition: Definition) -> Bridge:
        """Writes the turns of an environment."""
        return self.bridges.of(definition)
