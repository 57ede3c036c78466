"""Nodes that read all rows below theirs, and that make rows, in whole runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlflow import Batch, CausalLM, Optimizer, Pairs, PerSample, PerToken, RLModule, Rollout, node
from rlflow.types import Each, Grouped, NewRows, Ragged, RowPath, WithTexts
from tests.controller.runs import ZERO2, Fit, OddCharacters, Result, failing_fit, fit, sums
from tests.controller.test_ranks import FLOAT32, difference
from tests.ranks import RankPool

STEPS, NEEDED, GROUP = 3, 4, 3


class Pairing(RLModule):
    """The best sample of a prompt is preferred to its worst; where all are worth the same there is no pair."""

    group_size = GROUP
    max_response_length = 8
    stop_token_ids = tuple(range(40, 60))

    def __init__(self, model: str) -> None:
        self.model = model
        self.reward = OddCharacters()
        self.record: dict[str, list[Any]] = {}

    def configure_models(self) -> None:
        self.actor = CausalLM(self.model, optimizer=Optimizer("adamw", lr=3e-3), samples_per_update=2)
        self.reference = CausalLM(self.model, trainable=False)

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.actor.generate(batch, n=GROUP)

    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        return self.reward_function(rollout).clamp(max=4.0)  # so that some prompts have equal ones

    @node(role="reference")
    def ref_means(self, rollout: Rollout) -> PerSample:
        return self.reference.logprobs(rollout).sum(dim=1)  # made where rows are balanced

    @node
    def of_prompts(self, batch: Grouped, rewards: Each[PerSample], ref_means: Each[PerSample]) -> PerSample:
        self._note("counts", self.all_rows(rewards.counts))
        self._note("best", self.all_rows(rewards.max()))
        self._note("ref_means", self.all_rows(ref_means.mean()))
        return rewards.mean()

    @node
    def of_samples(
        self, rollout: Grouped, rewards: PerSample, of_prompts: PerSample, ref_means: PerSample
    ) -> PerSample:
        for name, x in {"group": rollout.group, "rewards": rewards, "means": of_prompts, "ref": ref_means}.items():
            self._note(f"of_samples/{name}", self.all_rows(x))
        return rewards

    @node
    def pairs(self, batch: Grouped, rollout: Each[Rollout], rewards: Each[PerSample]) -> NewRows[Pairs]:
        differ = rewards.max() > rewards.min()
        best, worst = rewards.argmax()[differ], rewards.argmin()[differ]
        return Pairs.of(rollout.values.take(best), rollout.values.take(worst))

    @node(role="reference")
    def ref_pairs(self, pairs: Pairs) -> PerSample:
        return responses(self.reference, pairs)

    @node
    def noted(self, pairs: Grouped, of_prompts: PerSample) -> PerSample:
        self._note("prompts", self.all_rows(pairs.group_of("batch")))
        self._note("index", self.all_rows(pairs.index))
        self._note("beside", self.all_rows(of_prompts))
        return of_prompts

    @node(role="actor", type="train")
    def actor_loss(self, pairs: Pairs, ref_pairs: PerSample) -> PerSample:
        chosen, rejected = (responses(self.actor, pairs) - ref_pairs).unbind(dim=1)
        return -logsigmoid(0.1 * (chosen - rejected))

    def _note(self, name: str, x: Tensor) -> None:
        self.record.setdefault(name, []).append(x.tolist())


def responses(model: CausalLM, pairs: Pairs) -> Tensor:
    """`[B, 2]`: log-probabilities of the two responses."""
    return torch.stack(model.logprobs(pairs.both).sum(dim=1).tensor_split(2), dim=1)


@dataclass(frozen=True)
class Labelled:
    """Tokens of the dataset's prompts with made-up responses, and of samples."""

    path: RowPath
    prompt_ids: Ragged
    response_ids: PerToken
    loss_mask: PerToken
    lengths: PerSample
    real: PerSample


class Mixed(Pairing):
    """Two rows of its own for each sample, of a type of its own, are trained on."""

    of_prompts = of_samples = pairs = ref_pairs = noted = ref_means = None

    @node
    def twice(self, rollout: Rollout, rewards: PerSample) -> NewRows[Labelled]:
        rows = torch.arange(len(rollout.lengths)).repeat(2)
        both = rollout.take(rows)
        real = torch.arange(len(rows)) < len(rollout.lengths)
        return Labelled(both.path, both.prompt_ids, both.response_ids, both.loss_mask, both.lengths, real.float())

    @node(role="actor", type="train")
    def actor_loss(self, twice: Labelled) -> PerToken:
        self._note("real", twice.real)
        return -self.actor.logprobs(twice) * twice.real[:, None]


def run(policy: Path, folder: Path, module: type[Pairing] = Pairing, steps: int = STEPS, **given: Any) -> Fit:
    return Fit(module(str(policy)), sums(12, NEEDED), folder, settings={"max_steps": steps}, **given)


@pytest.fixture(scope="module")
def runs(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> dict[int, Result]:
    """By the number of ranks, the first rank's."""
    folder = tmp_path_factory.mktemp("levels")
    both = ranks2.run(fit, run(policy, folder / "2", strategy=ZERO2))
    assert both[0].record.keys() == both[1].record.keys()
    return {1: fit(run(policy, folder / "1")), 2: both[0]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_row_above_sees_what_is_below_it(runs: dict[int, Result], ranks: int) -> None:
    record = runs[ranks].record
    for step in range(STEPS):
        rewards = torch.tensor(record["of_samples/rewards"][step]).view(NEEDED, GROUP)
        reference = torch.tensor(record["of_samples/ref"][step]).view(NEEDED, GROUP)
        assert record["counts"][step] == [GROUP] * NEEDED
        assert record["best"][step] == rewards.max(dim=1).values.tolist()
        assert torch.tensor(record["ref_means"][step]).tolist() == pytest.approx(
            reference.mean(dim=1).tolist(), abs=1e-5
        )
        means = rewards.mean(dim=1).repeat_interleave(GROUP)
        assert record["of_samples/means"][step] == pytest.approx(means.tolist(), abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_are_made_below_some_rows_and_not_below_others(runs: dict[int, Result], ranks: int) -> None:
    record = runs[ranks].record
    whole = 0
    for step in range(STEPS):
        rewards = torch.tensor(record["of_samples/rewards"][step]).view(NEEDED, GROUP)
        ids = record["of_samples/group"][step][::GROUP]
        differ = (rewards.max(dim=1).values > rewards.min(dim=1).values).tolist()
        assert record["prompts"][step] == [name for name, one in zip(ids, differ, strict=True) if one]
        assert record["index"][step] == [0] * sum(differ)
        means = [mean for mean, one in zip(rewards.mean(dim=1).tolist(), differ, strict=True) if one]
        assert record["beside"][step] == pytest.approx(means, abs=1e-6)
        whole += all(differ)
    assert whole < STEPS  # else nothing was left out


def test_made_rows_train_alike_on_one_rank_and_on_two(runs: dict[int, Result]) -> None:
    assert difference(runs[1].weights, runs[2].weights) < FLOAT32
    assert runs[1].record["prompts"] == runs[2].record["prompts"]


def test_a_step_without_a_made_row_trains_nothing(policy: Path, tmp_path: Path) -> None:
    class Equal(Pairing):
        def rewards(self, rollout: WithTexts) -> PerSample:
            return torch.ones(len(rollout.texts))

    found = fit(Fit(Equal(str(policy)), sums(12, NEEDED), tmp_path, settings={"max_steps": 2}))
    assert found.record["prompts"] == [[], []]
    assert "actor/grad_norm" not in found.steps[0]


def test_rows_of_a_type_of_ones_own_are_numbered_below_their_parents(policy: Path, tmp_path: Path) -> None:
    found = fit(run(policy, tmp_path, Mixed, steps=1))
    assert sorted(x for part in found.record["real"] for x in part) == [0.0] * NEEDED * GROUP + [1.0] * NEEDED * GROUP


class Orphans(Pairing):
    """Rows that are below none of this rank's."""

    def pairs(self, batch: Grouped, rollout: Each[Rollout], rewards: Each[PerSample]) -> NewRows[Pairs]:
        made = super().pairs(batch, rollout, rewards)
        return Pairs(made.prompt_ids, made.chosen_ids, made.rejected_ids, made.rows, self.paths(made.path))

    def paths(self, path: RowPath | None) -> RowPath | None:
        assert path is not None
        return RowPath(path.numbers + 1000, path.levels)


class Pathless(Orphans):
    def paths(self, path: RowPath | None) -> RowPath | None:
        return None


class OfOthers(Orphans):
    def paths(self, path: RowPath | None) -> RowPath | None:
        assert path is not None
        return RowPath(path.numbers, ("elsewhere", *path.levels[1:]))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (Orphans, "row 0 that node `pairs` returned on rank 0 has the parent 10"),
        (Pathless, "node `pairs` returned rows on rank 0 whose `path` is None, so that none has a parent ("),
        (OfOthers, "node `pairs` returned rows of elsewhere > rollout on rank 0 and sees rows of batch, so that none"),
    ],
)
def test_a_row_without_a_parent_is_refused_by_rank_node_and_row(
    module: type[Pairing], line: str, policy: Path, tmp_path: Path
) -> None:
    assert failing_fit(run(policy, tmp_path, module, steps=1)).error.removeprefix("step 1, ").startswith(line)
