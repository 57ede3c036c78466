"""The record of one step: prompts, responses, and the scores of the policies and the critic at the time."""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rlflow.models.picture_processor import PictureProcessor, class_of, copy_processor, reads_pictures
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout.engine import Completion, InProcessEngine, RankInfo, Sampling, SyncReport
from rlflow.values.picture import Picture
from rlflow.values.truncation import END
from tests.reference.update import PICTURES, load_classifier_float64, load_float64, response_logprobs, response_values

PROMPTS = 8  # of 1 to 8 tokens
GROUP, LONGEST = 3, 12
TEMPERATURE = 0.8
USELESS = (2, 5, 6, 7)  # prompts whose responses are all worth the same
TRUNCATED = ((0, 1), (3, 2))  # (prompt, response) that did not end by themselves

BEHIND_PICTURE = ":"  # transformers takes two pictures for one where nothing is between them

SMALLEST = 16  # tokens of a vocabulary that are compared
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """One response: its tokens, what was said of each of them, and whether it ended by itself."""

    tokens: Tokens
    rollout_logprobs: tuple[float, ...]
    old_logprobs: tuple[float, ...]
    old_values: tuple[float, ...]
    finished: bool
    reward: float

    @property
    def others(self) -> list[dict[int, float]]:
        """For each token, one to three others that could have been sampled, and their log-probabilities."""
        found = []
        for place, (token, own) in enumerate(zip(self.tokens, self.rollout_logprobs, strict=True)):
            number = 1 + place % 3
            shares = [2 * k / (number * (number + 1)) for k in range(1, number + 1)]
            left = math.log(max(1 - math.exp(own), 0.05))
            found.append({(token + k) % SMALLEST: left + math.log(s) for k, s in enumerate(shares, 1)})
        return found

    @property
    def segments(self) -> list[int]:
        """The response as a conversation: number of tokens of each turn and of each answer to it, in turns."""
        length = len(self.tokens)
        if length < 6:
            return [length]
        first, said = 1 + length % 3, 1 + length % 2
        rest = length - first - said
        return [first, said, rest] if rest < 5 else [first, said, 2, 1, rest - 3]

    @property
    def turn_rewards(self) -> list[float]:
        """The environment's reward for each turn of this conversation."""
        return [float((len(self.tokens) + 3 * turn) % 4) for turn in range((len(self.segments) + 1) // 2)]

    @property
    def spoken(self) -> list[bool]:
        """For each token of this conversation, whether the policy wrote it."""
        return [number % 2 == 0 for number, tokens in enumerate(self.segments) for _ in range(tokens)]


@dataclass(frozen=True)
class Recording:
    """Folders of models, and what belongs to each prompt; prompt `p` is the first `p + 1` letters of the alphabet.

    Attributes:
        policy: The language model to train.
        reference: Another.
        critic: The policy with a head of one number; None where transformers has no such model of the family.
        judge: The policy with another such head; None where the critic is.
        data: Folder of datasets, of the first `five` prompts, `all`, and the `useless` ones.
        prompts: Their tokens.
        answers: Answers to each prompt; the last one is the greedy one.
        pairs: The two responses that the dataset has for each prompt, the better one first.
    """

    policy: Path
    reference: Path
    critic: Path | None
    judge: Path | None
    data: Path
    prompts: list[Tokens]
    answers: list[list[Answer]]
    pairs: list[tuple[Tokens, ...]]

    def find(self, prompt: Sequence[int], response: Sequence[int]) -> Answer:
        """The answer to `prompt` with these tokens."""
        (found,) = [a for a in self.answers[self.number(prompt)][:-1] if a.tokens == tuple(response)]
        return found

    def number(self, prompt: Sequence[int]) -> int:
        """The number of a prompt."""
        return self.prompts.index(tuple(prompt))


def record(
    folder: Path,
    write: Callable[[Path, int], Path] | None = None,
    empty: Sequence[tuple[int, int]] = (),
    pictures: Sequence[Sequence[Picture]] = (),
) -> Recording:
    """Make models and a recording whose old policy and old critic are apart from the models given.

    Args:
        folder: Folder for them.
        write: Writes a language model into a folder by a seed; None for a small Qwen2.
        empty: (prompt, response) without a token; the dataset's answer is then the end of text alone.
        pictures: Pictures with which each prompt begins; none for a model that reads text alone.
    """
    write = write or _peaked
    policy, reference = (write(folder / name, seed) for name, seed in (("policy", 1), ("reference", 2)))
    has_heads = bool(pictures) or type(AutoConfig.from_pretrained(policy)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    critic, judge = (
        _with_head(policy, folder / name, seed) if has_heads else None for name, seed in (("critic", 3), ("judge", 4))
    )
    tokenizer = AutoTokenizer.from_pretrained(policy)
    texts = ["abcdefgh"[: p + 1] for p in range(PROMPTS)]
    prompts = [tuple(ids) for ids in tokenizer(texts)["input_ids"]]
    if pictures:
        prompts = _with_pictures(prompts, pictures, [policy, reference, critic, judge])
    draw, past = random.Random(3), _Past(policy, critic)

    def text(p: int, k: int) -> str:
        return "" if (p, k) in empty else _text(draw, p, k)

    answers = []
    for p, prompt in enumerate(prompts):
        responses = [text(p, k) for k in range(GROUP + 1)]
        assert len(set(responses)) == len(responses)
        rewards = {text.count("1") for text in responses[:-1]}
        assert (len(rewards) == 1) == (p in USELESS)
        group = []
        for k, response in enumerate(responses):
            cut = (p, k) in TRUNCATED
            end = () if cut or not response else (tokenizer.eos_token_id,)
            tokens = tuple(tokenizer(response)["input_ids"]) + end
            assert len(tokens) <= LONGEST
            assert not cut or len(tokens) == LONGEST
            group.append(Answer(tokens, *past.of(draw, prompt, tokens), not cut, float(response.count("1"))))
        answers.append(group)
    rows: list[dict[str, Any]] = [
        {"question": each, "answer": text(p, 0), "worse": text(p, 3), "label": p % 3 > 0}
        for p, each in enumerate(texts)
    ]
    for row, shown in zip(rows, pictures, strict=False):
        row["images"] = [f"data:image/png;base64,{base64.b64encode(each.data).decode()}" for each in shown]
    (folder / "data").mkdir()
    for name, held in {"five": rows[:5], "all": rows, "useless": [rows[p] for p in USELESS]}.items():
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    pairs = [
        tuple((*tokenizer(row[name])["input_ids"], tokenizer.eos_token_id) for name in ("answer", "worse"))
        for row in rows
    ]
    return Recording(policy, reference, critic, judge, folder / "data", prompts, answers, pairs)


def _peaked(folder: Path, seed: int) -> Path:
    """A tiny model that is far from indifferent, so that entropies and divergences have gradients."""
    write_tiny_model(folder, seed=seed, hidden_size=64, intermediate_size=96, layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 5
    model.save_pretrained(folder)
    return folder


def _with_pictures(
    prompts: list[Tokens], pictures: Sequence[Sequence[Picture]], folders: Sequence[Path | None]
) -> list[Tokens]:
    """The prompts with the ids of their pictures before them; what the reference sees of these is written."""
    policy = folders[0]
    assert policy is not None
    processor = PictureProcessor.load(policy, AutoConfig.from_pretrained(policy), AutoTokenizer.from_pretrained(policy))
    images = AutoImageProcessor.from_pretrained(policy)
    inputs: dict[Tokens, dict[str, Tensor]] = {}
    for prompt, shown in zip(prompts, pictures, strict=True):
        ids = tuple(processor.expand([processor.placeholder_id, ord(BEHIND_PICTURE)] * len(shown) + [*prompt], shown))
        made = images(images=[[each.opened() for each in shown]], return_tensors="pt") if shown else {}
        inputs[ids] = {name: made[name] for name in images.model_input_names if name in made}
    for folder in folders:
        assert folder is not None
        torch.save(inputs, folder / PICTURES)
    return list(inputs)


def _with_head(policy: Path, folder: Path, seed: int) -> Path:
    """The policy's weights with a random head of one number."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(policy)
    kind = class_of(config, scalar=True) if reads_pictures(config) else AutoModelForSequenceClassification
    model = kind.from_pretrained(policy, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(std=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    if reads_pictures(config):
        copy_processor(policy, folder)
    return folder


def _text(draw: random.Random, p: int, k: int) -> str:
    """A response in digits: of a useless prompt with two ones, else with as many as it happens to have."""
    if (p, k) in TRUNCATED:
        return "".join(draw.choice("0123") for _ in range(LONGEST))
    length = draw.randint(2, LONGEST - 1)
    if p not in USELESS:
        return "".join(draw.choice("0123") for _ in range(length))
    digits = ["1", "1", *(draw.choice("023") for _ in range(length - 2))]
    draw.shuffle(digits)
    return "".join(digits)


class _Past:
    """The policy and the critic at the start of the step, which are made up: near those given, but not they."""

    def __init__(self, policy: Path, critic: Path | None) -> None:
        self._policy = load_float64(policy)
        self._critic = load_classifier_float64(critic) if critic else None

    @torch.no_grad()
    def of(self, draw: random.Random, prompt: Tokens, tokens: Tokens) -> tuple[tuple[float, ...], ...]:
        """Rollout logprobs, old logprobs and old values, such that clips bind at some tokens and not at others."""
        now = response_logprobs(self._policy, prompt, tokens, TEMPERATURE).tolist()
        old = tuple(logprob + draw.uniform(-0.5, 0.5) for logprob in now)
        rollout = tuple(logprob + draw.uniform(-0.9, 0.9) for logprob in old)
        if self._critic is None:
            return rollout, old, ()
        values, _ = response_values(self._critic, prompt, tokens)
        return rollout, old, tuple(value + draw.uniform(-0.5, 0.5) for value in values.tolist())


class Recorded(InProcessEngine):
    """Answers the k-th request for a prompt with its k-th recorded response, greedy requests with the last one."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._most_kept = 0

    def return_support(self, most: int) -> None:
        self._most_kept = most

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        self._context = 1024
        if reads_pictures(config := AutoConfig.from_pretrained(model_path)):
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
        asked: dict[int, int] = {}
        completions = []
        for number in map(self._recording.number, prompts):
            turn = asked[number] = asked.get(number, -1) + 1
            answer = self._recording.answers[number][-1 if sampling.temperature == 0 else turn]
            columns: dict[str, Any] = {}
            if sampling.notes_support(self._most_kept):
                both = [[*zip(*each.items(), strict=True)] for each in answer.others]
                columns["support"] = np.array([token for ids, _ in both for token in (*ids, END)], np.int32)
                noted = zip(both, answer.rollout_logprobs, strict=True)
                columns["support_logprobs"] = np.array([p for (_, theirs), own in noted for p in (*theirs, own)])
            completions.append(Completion(answer.tokens, answer.rollout_logprobs, answer.finished, columns))
        return completions

    def _load(self, weights: Any) -> None:
        raise AssertionError("`update_weights` takes no weights")

    def _held(self) -> Any:
        raise AssertionError("`update_weights` reads none back")
