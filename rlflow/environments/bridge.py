"""`Bridge`, between messages and tokens: it writes the turns of a conversation, and reads those of the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.environments.messages import Message
from rlflow.environments.tool_calls import ToolCall, ToolForm


@dataclass(frozen=True)
class ParsedTurn:
    """What a policy said in a turn.

    Attributes:
        text: Without special tokens; where the bridge tells them apart, without thoughts and calls of tools.
        calls: Of tools, in their order.
        whole: All that it wrote, without special tokens.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    whole: str = ""


class Bridge(ABC):
    """Writes and reads the turns of one environment's conversations. Tokens that were sampled stay as they are.

    Attributes:
        ends: Tokens that end a turn of the policy; the first of them is the one that closes a turn which was cut.
        form: In which calls of tools are read, of `TOOL_FORMS`; None where a renderer reads them, or there are none.
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
            new: What the environment says.
            spoken: Ids of the policy's turn.
            before: Ids of all that stood before the turn, the prompt among it.

        Raises:
            UserError: The model's family cannot write these messages.
        """

    @abstractmethod
    def read(self, spoken: Sequence[int], before: Sequence[int] = ()) -> ParsedTurn:
        """What the policy said, from the tokens of its turn; `before` as of `after`."""
