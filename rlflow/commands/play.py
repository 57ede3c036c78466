"""`rlflow play`: the environment of a config, played in the terminal by a person or a script."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlflow.commands.configuration import Configured, call_configured
from rlflow.commands.screen import Screen
from rlflow.context.conversations import ConversationRunner, ConverseCall
from rlflow.dag.node import BATCH
from rlflow.data.prompts import Encoder, PromptData
from rlflow.databuffer.transport import Transport
from rlflow.environments.environment import Environment
from rlflow.errors import UserError, about, one_line
from rlflow.harness.harness import Harness
from rlflow.loggers.transcript import text as written
from rlflow.module import RLModule, environments, handles
from rlflow.rewards.reward import RewardInput, scored
from rlflow.rollout.conversation import Conversation
from rlflow.rollout.engine import Completion, RankInfo, RolloutEngine, Sampling, SyncReport
from rlflow.run.placement import followed_role
from rlflow.run.preflight import resolved
from rlflow.run.prepare import model_path, read_graph
from rlflow.run.pretrained import load_tokenizer, stop_tokens
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath
from rlflow.values.picture import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAY_SECONDS = 86_400.0  # of an agent's episode


def play(
    configured: Configured,
    /,
    row: int = 0,
    replies: Path | None = None,
    tokens: bool = False,
    environment: str | None = None,
) -> None:
    """Play the environment of a config in the terminal, as its policy would read it. No weights are loaded.

    Args:
        configured: The algorithm with the environment, and the data.
        row: Row of the training data, from 0.
        replies: File with the policy's turns, a line each, or .jsonl; else standard input.
        tokens: Show tokens, and who wrote each of them.
        environment: Name of an environment of the module, where it has several.

    Raises:
        UserError: The config has no environment, or none that can be played so; there is no such row; the environment
            failed; or replies ran out.
    """
    module, data, screen = configured.module, configured.data, Screen()
    answering = _environment(module, environment)
    if isinstance(answering, Harness):  # whose limit is of a whole episode, in which a person types
        assert answering.limits is not None
        answering.limits = replace(answering.limits, timeout_s=PLAY_SECONDS)
    graph = read_graph(module)
    policy = followed_role(module, graph) or graph.trained_roles()[0]
    with tempfile.TemporaryDirectory() as scratch:
        model = model_path(module, policy, Path(scratch))
        with about(handles(module)[policy]):
            tokenizer = load_tokenizer(model, handles(module)[policy].trust_remote_code)
        stops = stop_tokens(model, tokenizer, module.stop_token_ids)
    data = resolved(data, module, graph)
    encode, first = Encoder(data, tokenizer), _row(data, row)

    def show(who: str, ids: Sequence[int]) -> None:
        text = str(tokenizer.decode(list(ids), skip_special_tokens=False))
        if tokens:
            text = "  ".join(f"{token} {_piece(tokenizer, token)}" for token in ids)
        screen.block(who, f"{len(ids)} tokens", text)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    said = by_hand() if replies is None else by_script(replies)
    player = Player(said, tokenizer, encode.bridge(answering.definition_of(first)).end, show)
    sampling = Sampling(module.max_response_length, stop_token_ids=stops)
    runner = ConversationRunner(
        encode.bridge, encode.messages, data.max_prompt_length, decode, torch.float32, seed=0, transport=Transport()
    )
    call = ConverseCall(0, "play", policy, {policy: 0}, Layout((0,), 1))
    path = RowPath(torch.tensor([[row]]), (BATCH,))
    try:
        rollout, views, _ = runner.run({policy: player}, answering, [first], path, 1, sampling, call)
    except KeyboardInterrupt:
        screen.line("left before the end")
        return
    finally:
        runner.close()
    seats = answering.definition_of(first).seats
    for each in views:
        _show_end(screen, each, f" of `{seats[each.seat]}`" if seats else "")
    if module.scorer is not None:
        scores = scored(module.scorer, RewardInput(rollout.texts, rollout.rows, conversations=rollout.messages))
        for place, total in enumerate(scores.total):
            parts = "".join(f", {name} {part[place] or 0.0:g}" for name, part in scores.parts.items())
            screen.line(f"reward of the module: {total:g}{parts}")


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow play`."""
    call_configured(play, arguments)


def _environment(module: RLModule, name: str | None) -> Environment:
    """The environment of this name, or the module's only one."""
    found = environments(module)
    if not found:
        raise UserError(
            f"`module` is {type(module).__name__} without an environment, so there is nothing to play; set"
            " `module.environment`, see docs/agents.md"
        )
    if name not in found and (name is not None or len(found) > 1):
        raise UserError(f"{type(module).__name__} has the environments {', '.join(found)}; name one by `--environment`")
    return found[name or next(iter(found))]


def _row(data: PromptData, row: int) -> dict[str, Any]:
    if not 0 <= row < len(data.train):
        raise UserError(f"`--row` is {row}, and {data.train.name} has the rows 0 to {len(data.train) - 1}; give one")
    return data.train.read([row])[0]


def _show_end(screen: Screen, view: Conversation, whose: str) -> None:
    """Show the outcome of a conversation, or in a game the outcome of a seat."""
    for message in view.messages:
        if "unread" in message:
            screen.block(f"environment {message['role']}", "which no turn reads", written(message))
    turns = "1 turn" if view.turns == 1 else f"{view.turns} turns"
    each = ", ".join(f"{reward:g}" for reward in view.rewards)
    screen.line()
    screen.line(f"{turns}{whose}, {sum(view.written)} of {len(view.tokens)} tokens by the policy")
    if view.calls:
        screen.line(f"tool calls: {view.calls}; {view.failed} gave no value")
    screen.line(f"rewards of the environment: {each} (sum {sum(view.rewards):g})")
    assert view.ended is not None
    screen.line(f"ended: {view.ended.name.lower()}, {view.why}", "bold")


def _piece(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as text; for a part of a character, the tokenizer's name of it."""
    piece = str(tokenizer.decode([token], skip_special_tokens=False))
    return repr(str(tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in piece else piece)


OnTokens = Callable[[str, Sequence[int]], None]  # who wrote tokens, and which


class Player(RolloutEngine):
    """A rollout engine whose turns a person or a script writes; it takes one turn after another.

    In a game it takes the turns of all seats.

    Args:
        replies: Texts of the turns, one each.
        tokenizer: Tokenizer of the model.
        end: The token that ends a turn.
        on_tokens: Callback for each part of the conversation, as soon as it can be read.
    """

    def __init__(
        self, replies: Iterator[str], tokenizer: PreTrainedTokenizerBase, end: int, on_tokens: OnTokens
    ) -> None:
        self._replies = replies
        self._tokenizer = tokenizer
        self._end = end
        self._on_tokens = on_tokens
        self._views: list[list[int]] = []  # of each seat, the tokens that were read or written

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        version: int,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Completion]:
        """A turn after each prompt. A reply that is longer than a turn may be is cut, as a model's is.

        Raises:
            KeyboardInterrupt: A person ended the input.
        """
        limits = sampling.limits_of(len(prompts))
        return [self._turn(list(prompt), longest, sampling) for prompt, longest in zip(prompts, limits, strict=True)]

    def _turn(self, prompt: list[int], longest: int, sampling: Sampling) -> Completion:
        view = next((view for view in self._views if view == prompt[: len(view)]), [])
        if not view:
            self._views.append(view)
        self._on_tokens("environment" if view else "prompt", prompt[len(view) :])
        said = [*self._tokenizer(next(self._replies), add_special_tokens=False)["input_ids"], self._end]
        stops = (place for place, token in enumerate(said) if token in sampling.stop_token_ids)
        turn = said[: min(longest, next(stops) + 1)]
        view[:] = [*prompt, *turn]
        self._on_tokens("policy", turn)
        return Completion(tuple(turn), (0.0,) * len(turn), turn[-1] in sampling.stop_token_ids)

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        """There is nothing to build."""

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        """A player has no weights."""
        raise AssertionError("a player has no weights")

    def close(self) -> None:
        """There is nothing to free."""


def by_hand() -> Iterator[str]:
    """The lines that a person types, or that come in by a pipe.

    Raises:
        KeyboardInterrupt: A person ended the input.
        UserError: A pipe did.
    """
    turn, asks = 1, sys.stdin.isatty()
    while True:
        try:
            print("> " if asks else "", end="", flush=True)  # `input` itself may write it to the error output
            yield input()
        except (EOFError, KeyboardInterrupt):
            if asks:
                print()
                raise KeyboardInterrupt from None
            raise _too_few("standard input", turn) from None
        turn += 1


def by_script(path: Path) -> Iterator[str]:
    """The lines of a file; where it ends in `.jsonl`, each is a JSON string, which may have line ends.

    Raises:
        UserError: It cannot be read, or has too few.
    """
    what = f"`--replies` is {str(path)!r}"
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        replies = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else lines
    except (OSError, ValueError) as error:
        raise UserError(
            f"{what}, which cannot be read ({one_line(error)}); name a file of lines, or of JSON strings (.jsonl)"
        ) from error
    for turn, reply in enumerate(replies, 1):
        if not isinstance(reply, str):
            raise UserError(f"{what}, whose line {turn} is not a text; write each reply as a JSON string")
        yield reply
    raise _too_few(f"`--replies` {path}", len(replies) + 1)


def _too_few(source: str, turn: int) -> UserError:
    return UserError(f"{source} has {turn - 1} replies, and the conversation continues to turn {turn}; give more")
