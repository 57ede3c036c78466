"""The inputs of `rlflow check`: small seeded models, and recorded prompts, responses, tool's tokens and rewards."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.picture_processor import PictureProcessor, reads_pictures
from rlflow.models.tiny import write_tiny_model, write_tiny_vision_model
from rlflow.rewards.reward import SampleReward
from rlflow.rollout.engine import Completion, InProcessEngine, RankInfo, Sampling, SyncReport
from rlflow.values.picture import Picture
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout

LONGEST = 12  # tokens of a recorded response, the end token included
END = 0  # the end token of the embedded tokenizer, whose other ids are the characters' codes
GREEDY = 97  # number of the response that is recorded for temperature 0
PICTURES, SIDE = "recorded pictures", 56  # a column of the rows; pixels of a picture's side
FAILS = "9"  # a response that begins with it is one that the reward fails on
EVEN = "6"  # responses that begin with it are all worth the same

# Five prompts, so that two ranks have 3 and 2. The sum of a prompt's ids, modulo 5, says what is odd about its group:
# 0 one response is cut, 1 one is empty, 2 one fails to be scored, 3 another is cut, 4 all are worth the same. Two share
# a prefix that is long enough to be computed once.
PROMPTS = ("d", "ac", "abf", "abcdefghijl", "abcdefghijkk")
CUT, EMPTY, FAILING, EQUAL = (0, 3), 1, 2, 4


def recorded_rows(like: Mapping[str, Any], pictures: bool = False) -> list[dict[str, Any]]:
    """The rows of the dataset: a prompt, and a response and a worse one for algorithms that learn from those.

    Args:
        like: A row whose columns the rows have as well. Its texts end differently in each row, so that prompts which a
            node writes from them differ.
        pictures: Whether each row has a picture, and one of them two.
    """
    draw = random.Random(0)
    rows = []
    for number, prompt in enumerate(PROMPTS):
        answer, worse = ("".join(draw.choices("012345", k=draw.randint(2, 9))) for _ in range(2))
        fields = {name: _ended(value, "abcde"[number]) for name, value in like.items()}
        rows.append(fields | {"question": prompt, "answer": answer, "response": answer, "worse": worse})
        if pictures:
            rows[-1][PICTURES] = [_picture(draw) for _ in range(2 if number == 1 else 1)]
    return rows


def _picture(draw: random.Random) -> Any:
    """Random pixels."""
    from PIL import Image

    return Image.frombytes("RGB", (SIDE, SIDE), draw.randbytes(3 * SIDE * SIDE))


def _ended(value: Any, ending: str) -> Any:
    """A copy of a column's value in which each text has this ending."""
    if isinstance(value, str):
        return value + ending
    if isinstance(value, Mapping):
        return {name: _ended(part, ending) for name, part in value.items()}
    return value


def write_model(folder: Path, seed: int, has_head: bool, sees: bool = False) -> Path:
    """Write a seeded model with clear preferences, so that entropies and divergences have gradients.

    Args:
        folder: Folder to write.
        seed: Seed of the weights.
        has_head: Whether it scores by one number, as a critic or a reward model does.
        sees: Whether it reads pictures.
    """
    if sees and not has_head:
        return write_tiny_vision_model(folder, seed=seed)
    if not folder.exists():
        write_tiny_model(folder, seed=seed, hidden_size=32, intermediate_size=48)
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights["model.embed_tokens.weight"] *= 5
        if has_head:
            draw = torch.Generator().manual_seed(seed)
            weights["score.weight"] = 0.1 * torch.randn(1, 32, generator=draw)
            config = json.loads((folder / "config.json").read_text())
            config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
            (folder / "config.json").write_text(json.dumps(config | {"label2id": {"LABEL_0": 0}}))
        save_file(weights, file, metadata={"format": "pt"})
    return folder


class Recorded(InProcessEngine):
    """Answers the k-th request for a prompt in a call with its k-th recorded response.

    A response follows from the prompt's tokens and from k alone. So the same responses are there on any number of
    ranks, and in any order of the prompts.

    Args:
        backwards: Give the responses of a prompt in the opposite order.
        all_differ: Record no group whose rewards are all equal, since a filter would draw again in its place.
    """

    def __init__(self, backwards: bool = False, all_differ: bool = False) -> None:
        self._backwards = backwards
        self._all_differ = all_differ

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        from transformers import AutoConfig

        self._context = None
        if reads_pictures(config := AutoConfig.from_pretrained(model_path, trust_remote_code=False)):
            self._processor = PictureProcessor.load(Path(model_path), config)

    def close(self) -> None:
        """Nothing is open."""

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        tensors = [weight for bucket in buckets for _, weight in bucket]
        self.policy_version = version
        return SyncReport(version, len(tensors), 0, 0.0)

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Completion]:
        asked, alike = Counter[tuple[int, ...]](), Counter(map(tuple, prompts))
        completions = []
        for prompt, limit in zip(map(tuple, prompts), sampling.limits_of(len(prompts)), strict=True):
            number = alike[prompt] - 1 - asked[prompt] if self._backwards else asked[prompt]
            asked[prompt] += 1
            completions.append(self._answer(prompt, GREEDY if sampling.temperature == 0 else number, limit))
        return completions

    def _answer(self, prompt: tuple[int, ...], number: int, limit: int) -> Completion:
        draw, kind = random.Random(f"{prompt} {number}"), sum(prompt) % 5
        cut, empty = kind in CUT and number == 1 + (kind == 0), kind == EMPTY and number == 2
        digits = draw.choices("02345", k=LONGEST if cut else draw.randint(3, LONGEST - 1))
        ones = number if number < 2 else draw.randint(0, 2)
        for place in draw.sample(range(1, len(digits)), ones):
            digits[place] = "1"
        if kind == FAILING and number == 1:
            digits[0] = FAILS
        if kind == EQUAL and not self._all_differ:
            digits[0] = EVEN
        tokens = () if empty else (*(ord(digit) for digit in digits), *(() if cut else (END,)))
        logprobs = tuple(draw.uniform(-6.0, -0.5) for _ in tokens)
        return Completion(tokens[:limit], logprobs[:limit], not cut and len(tokens) <= limit)

    def _load(self, weights: Any) -> None:
        raise AssertionError("`update_weights` takes no weights")

    def _held(self) -> Any:
        raise AssertionError("`update_weights` reads none back")


class RecordedReward(SampleReward):
    """A reward from 0 to 1 by the number of ones in a response; it fails on one response, which is dropped.

    Args:
        parts: Names of the parts, for algorithms that read them; each counts another digit. Empty for one number.
    """

    def __init__(self, parts: Sequence[str] = ()) -> None:
        super().__init__(on_error="drop")
        self._parts = tuple(parts)

    def score_sample(self, text: str, row: dict[str, Any]) -> float | Mapping[str, float]:
        if text.startswith(FAILS):
            raise ValueError("this response is recorded as one that the reward fails on")
        if not self._parts:
            return _worth(text, "1")
        return {name: _worth(text, "102345"[place % 6]) for place, name in enumerate(self._parts)}

    def _warn(self, failures: Sequence[str], responses: Any) -> None:
        """The failure is meant."""


def _worth(text: str, digit: str) -> float:
    """A score from 0 to 1 by the number of a digit, and a little by the rest of the text, so that no two are equal."""
    if text.startswith(EVEN):
        return 0.5
    return 0.4 * (text.count(digit) % 3) + 0.2 * random.Random(text).random()


def with_tool(rollout: Rollout, rewards: bool) -> Rollout:
    """The responses as conversations: an environment wrote some tokens of responses with 6 tokens or more.

    Of 9 tokens the policy wrote 1, the environment 2, the policy 2, the environment 1 and the policy the last 3.

    Args:
        rollout: Responses of one turn.
        rewards: Whether the environment pays for turns.
    """
    segments = [_segments(length) for length in rollout.lengths.tolist()]
    spoken = torch.zeros_like(rollout.loss_mask)
    for row, tokens in enumerate(segments):
        by = [place % 2 == 0 for place, count in enumerate(tokens) for _ in range(count)]
        spoken[row, : len(by)] = torch.tensor(by, dtype=torch.bool)
    turns = [(len(each) + 1) // 2 for each in segments]
    paid = [
        float((sum(each) + 3 * turn) % 4) if rewards else 0.0
        for each in segments
        for turn in range((len(each) + 1) // 2)
    ]
    return replace(
        rollout,
        loss_mask=rollout.loss_mask & spoken,
        logprobs=rollout.logprobs.where(spoken, 0.0),
        segments=Ragged.from_lists(segments),
        turn_rewards=Ragged(rollout.logprobs.new_tensor(paid), torch.tensor(turns)),
    )


def _segments(length: int) -> list[int]:
    """Numbers of tokens of the policy's first turn, of the answer to it, and so on."""
    if length < 6:
        return [length]
    first, said = 1 + length % 3, 1 + length % 2
    rest = length - first - said
    return [first, said, rest] if rest < 5 else [first, said, 2, 1, rest - 3]


def parts_of(reward: Any) -> tuple[str, ...]:
    """Names of a reward's parts, if the reward has them before it is called."""
    parts = getattr(reward, "parts", {})
    if not isinstance(parts, Mapping):
        raise UserError(
            f"`parts` of {reward} is {parts!r:.60}, not a mapping; give a mapping whose keys are the parts' names"
        )
    return tuple(parts)
