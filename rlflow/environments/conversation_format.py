"""Form in which a run's model writes conversations: a bridge for each environment, and tokens of those written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlflow.environments.bridge import ROLES, Bridge, Message, message, text_of
from rlflow.environments.environment import Definition
from rlflow.environments.renderer_bridge import RendererBridge, RendererName
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def bridge_of(
    definition: Definition,
    tokenizer: PreTrainedTokenizerBase,
    renderer: RendererName | None = None,
    tool_calls: str | None = None,
) -> Bridge:
    """The bridge that writes and reads the turns of an environment.

    Args:
        definition: Definition of the environment.
        tokenizer: Tokenizer of the model.
        renderer: Value of `data.renderer`; None for the model's chat template.
        tool_calls: Value of `data.tool_calls`.

    Raises:
        UserError: The model's template, or the renderer, cannot write its turns.
    """
    if renderer is None:
        return TemplateBridge(tokenizer, definition.schemas, tool_calls, must_be_stable=not definition.repeats)
    return RendererBridge(tokenizer, renderer, definition.schemas, "user" if definition.answers_messages else "tool")


def conversation_tokens(
    messages: Sequence[Any], bridge: Bridge, ids_of: Callable[[str], list[int]], place: str, given: int = 0
) -> tuple[list[int], list[int], list[bool]]:
    """The tokens that a policy with the same words would have sampled and read.

    Those before its first turn; the rest; and of each of the rest whether the policy wrote it: its turns are, with the
    token that ends each.

    Args:
        messages: Messages of the prompt; then turns of role `assistant`, whose content holds calls of tools as the
            model is to write them, and between them what answers.
        bridge: Writes turns.
        ids_of: Function from a turn's text to its token ids.
        place: Name of the messages in errors.
        given: Number of the first messages that are the prompt, turns of `assistant` among them too.

    Raises:
        UserError: They are not turns of a policy with answers between them.
    """
    read = [_read(each, place) for each in messages]
    turns = [number for number, each in enumerate(read) if each["role"] == "assistant" and number >= given]
    if not turns or turns[0] == 0 or turns[-1] != len(read) - 1:
        raise UserError(
            f"{place} has the roles {', '.join(each['role'] for each in read) or 'of nobody'}; a conversation to learn"
            " from begins with a prompt and ends with a turn of `assistant`. Correct or remove the row"
        )
    prompt, tokens, written = bridge.begin(read[: turns[0]]), list[int](), list[bool]()
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        spoken = [*ids_of(read[turn]["content"]), bridge.end_of(read[turn]["content"])]
        before = prompt + tokens
        tokens += spoken
        written += [True] * len(spoken)
        if following is None:
            break
        if following == turn + 1:
            raise UserError(f"{place} has two turns of `assistant` that nothing answers between; join them")
        answer = bridge.after(read[turn + 1 : following], spoken, before)
        tokens += answer
        written += [False] * len(answer)
    return prompt, tokens, written


def _read(given: Any, place: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ROLES or "content" not in given:
        raise UserError(f"{place} has {given!r:.60}, not a message with a role and content; correct or remove the row")
    if given.get("tool_calls"):
        raise UserError(
            f"{place} has a message with `tool_calls`; write the calls into its content, as the model is to write them"
        )
    return {**message(given["role"], ""), **given, "content": text_of(given["content"], place)}
