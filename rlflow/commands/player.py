"""`Player`, who takes a policy's turns in place of a model: a person, or a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from rlflow.errors import UserError, one_line
from rlflow.rollout.engine import Completion, EnginePlace, RolloutEngine, Sampling, SyncReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnTokens = Callable[[str, Sequence[int]], None]  # who wrote tokens, and which


class LeftError(Exception):
    """The player takes no more turns."""


class Player(RolloutEngine):
    """Takes turns as an engine does, one after another: what is said becomes tokens as those of a policy.

    Of a game it takes those of all seats.

    Args:
        replies: What is said, a turn each.
        tokenizer: Of the model.
        end: The token that ends a turn.
        on_tokens: Called with each part of the conversation, when it is there to be read.
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
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, version: int
    ) -> list[Completion]:
        """One turn. A reply that is longer than the turn may be is cut, as a model's is.

        Raises:
            LeftError: There is no further reply.
        """
        (prompt,), (longest,) = prompts, sampling.limits_of(len(prompts))
        view = next((view for view in self._views if view == prompt[: len(view)]), [])
        if not view:
            self._views.append(view)
        self._on_tokens("environment" if view else "prompt", prompt[len(view) :])
        said = self._said(next(self._replies))
        stops = (place for place, token in enumerate(said) if token in sampling.stop_token_ids)
        turn = said[: min(longest, next(stops) + 1)]
        view[:] = [*prompt, *turn]
        self._on_tokens("policy", turn)
        return [Completion(tuple(turn), (0.0,) * len(turn), turn[-1] in sampling.stop_token_ids)]

    def _said(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self._end]

    def setup(self, model_path: str, place: EnginePlace) -> None:
        """There is nothing to build."""

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        """A player has no weights."""
        raise AssertionError("a player has no weights")

    def close(self) -> None:
        """There is nothing to free."""


def by_hand() -> Iterator[str]:
    """What a person types, a line each, or what comes in by a pipe.

    Raises:
        LeftError: A person ended the input.
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
                raise LeftError from None
            raise _too_few("standard input", turn) from None
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 ({one_line(error)}); send text") from error
        turn += 1


def by_script(path: Path) -> Iterator[str]:
    """The lines of a file; where it ends in `.jsonl`, each is a JSON string, which may have line ends.

    Raises:
        UserError: It cannot be read, or has too few.
    """
    for number, line in enumerate(_lines(path), 1):
        yield _text(line, f"`--replies` {path}, line {number}") if path.suffix == ".jsonl" else line
    raise _too_few(f"`--replies` {path}", len(_lines(path)) + 1)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(
            f"`--replies` is {str(path)!r}, which cannot be read ({reason}); name a file of lines"
        ) from error


def _text(line: str, where: str) -> str:
    try:
        text = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({one_line(error)}); write each reply as a JSON string") from error
    if not isinstance(text, str):
        raise UserError(f"{where} is {line!r:.60}, not a text; write each reply as a JSON string")
    return text


def _too_few(source: str, turn: int) -> UserError:
    return UserError(f"{source} has {turn - 1} replies, and the conversation goes on to turn {turn}; give more")
