"""`rlflow play`: the environment of a config, played in the terminal by a person or a script."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlflow.commands.configuration import Configured, config_parser, configured
from rlflow.commands.player import LeftError, Player, by_hand, by_script
from rlflow.commands.screen import Screen
from rlflow.controller.conversations import ConversationRunner, ConverseCall
from rlflow.dag.node import BATCH
from rlflow.data.prompts import Encoder
from rlflow.databuffer.transport import Transport
from rlflow.environments.conversation_format import Bridges, ConversationFormat
from rlflow.environments.environment import Environment
from rlflow.errors import UserError, about
from rlflow.loggers.transcript import text as written
from rlflow.module import environments, handles
from rlflow.process.status import refusing_exits
from rlflow.rewards.reward import RewardInput, scored
from rlflow.rollout.conversation import Conversation
from rlflow.rollout.engine import Sampling
from rlflow.run.checks import resolved
from rlflow.run.placement import followed_role
from rlflow.run.prepare import model_path, read_graph
from rlflow.run.pretrained import load_tokenizer, stop_tokens
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Play:
    """A conversation with a config's environment.

    Attributes:
        configured: The config.
        row: Of the training data, from 0.
        replies: A file of what the policy says; None for standard input.
        tokens: Whether tokens are shown.
        environment: Of the module; None for its only one.
    """

    configured: Configured
    row: int = 0
    replies: Path | None = None
    tokens: bool = False
    environment: str | None = None
    screen: Screen = field(default_factory=Screen)

    def run(self) -> None:
        """Have it, show it as it goes, and what it came to. No weights are loaded.

        Raises:
            UserError: The config has no environment, or none that can be played so; there is no such row; the
                environment failed; or replies ran out.
        """
        with self.configured.keys.in_errors(self.configured.config), tempfile.TemporaryDirectory() as scratch:
            self._play(Path(scratch))

    def _play(self, scratch: Path) -> None:
        module, data = self.configured.module, self.configured.data
        environment = self._environment()
        graph = read_graph(module)
        policy = followed_role(module, graph) or graph.trained_roles()[0]
        model = model_path(module, policy, scratch)
        with about(handles(module)[policy]):
            tokenizer = load_tokenizer(model, handles(module)[policy].trust_remote_code)
        bridges = Bridges(tokenizer, data.renderer, data.tool_calls)
        data = resolved(data, module, graph)
        conversation_format = ConversationFormat(bridges, Encoder(data, tokenizer).messages, data.max_prompt_length)
        row = self._row()
        end = bridges.of(environment.definition_of(row)).end
        replies = by_hand() if self.replies is None else by_script(self.replies)
        player = Player(replies, tokenizer, end, lambda who, ids: self._show(tokenizer, who, ids))
        stops = stop_tokens(model, tokenizer, module.stop_token_ids)
        sampling = Sampling(module.max_response_length, stop_token_ids=stops)

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))

        runner = ConversationRunner(conversation_format, decode, torch.float32, seed=0, transport=Transport())
        call = ConverseCall(0, "play", policy, {policy: 0}, Layout((0,), 1))
        path = RowPath(torch.tensor([[self.row]]), (BATCH,))
        try:
            rollout, views, _ = runner.run({policy: player}, environment, [row], path, 1, sampling, call)
        except (LeftError, KeyboardInterrupt):
            self.screen.line("left before the end")
            return
        finally:
            runner.close()
        seats = environment.definition_of(row).seats
        for each in views:
            self._show_end(each, f" of `{seats[each.seat]}`" if seats else "")
        if module.scorer is not None:
            scores = scored(module.scorer, RewardInput(rollout.texts, rollout.rows, conversations=rollout.messages))
            for place, total in enumerate(scores.total):
                parts = "".join(f", {name} {part[place] or 0.0:g}" for name, part in scores.parts.items())
                self.screen.line(f"reward of the module: {total:g}{parts}")

    def _environment(self) -> Environment:
        module = self.configured.module
        found = environments(module)
        if not found:
            raise UserError(
                f"`module` is {type(module).__name__} without an environment, so there is nothing to play; set"
                " `module.environment`, see docs/agents.md"
            )
        name = self.environment or next(iter(found))
        if name not in found or (self.environment is None and len(found) > 1):
            raise UserError(
                f"{type(module).__name__} has the environments {', '.join(found)}; name one by `--environment`"
            )
        return found[name]

    def _row(self) -> dict[str, Any]:
        train = self.configured.data.train
        if not 0 <= self.row < len(train):
            raise UserError(f"`--row` is {self.row}, and {train.name} has the rows 0 to {len(train) - 1}; give one")
        return train.read([self.row])[0]

    def _show(self, tokenizer: PreTrainedTokenizerBase, who: str, ids: Sequence[int]) -> None:
        """Show a part of the conversation: its text, special tokens among it, or each token."""
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        if self.tokens:
            text = "  ".join(f"{token} {_piece(tokenizer, token)}" for token in ids)
        self.screen.block(who, f"{len(ids)} tokens", str(text))

    def _show_end(self, view: Conversation, whose: str) -> None:
        """Show what a conversation came to; of a game, what a seat's did."""
        for message in view.messages:
            if "unread" in message:
                self.screen.block(f"environment {message['role']}", "which no turn reads", written(message))
        turns = "1 turn" if view.turns == 1 else f"{view.turns} turns"
        each = ", ".join(f"{reward:g}" for reward in view.rewards)
        self.screen.line()
        self.screen.line(f"{turns}{whose}, {sum(view.written)} of {len(view.tokens)} tokens by the policy")
        if view.calls:
            self.screen.line(f"tool calls: {view.calls}, of which {view.failed} gave no value")
        self.screen.line(f"rewards of the environment: {each} (sum {sum(view.rewards):g})")
        assert view.ended is not None
        self.screen.line(f"ended: {view.ended.name.lower()}, {view.why}", "bold")


def read_play(arguments: Sequence[str]) -> Play:
    """What `rlflow play` plays."""
    parser = config_parser("play", "Play the environment of a config in the terminal, as its policy would read it.")
    parser.add_argument("--row", type=int, default=0, help="of the training data, from 0")
    parser.add_argument("--replies", type=str | None, default=None, help="a file of turns, a line each, or .jsonl")
    parser.add_argument("--tokens", type=bool, default=False, help="show tokens, and who wrote which")
    parser.add_argument("--environment", type=str | None, default=None, help="of the module, where it has several")
    with refusing_exits():
        found = configured(parser, arguments, {"tokens": "true"})
    options = found.options
    replies = None if options.replies is None else Path(options.replies)
    return Play(found, options.row, replies, options.tokens, options.environment)


def _piece(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as text; of a part of a character, what the tokenizer calls it."""
    piece = str(tokenizer.decode([token], skip_special_tokens=False))
    return repr(str(tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in piece else piece)
