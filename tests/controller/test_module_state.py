"""A module whose state is tensors, in whole runs: alike on any ranks, and after a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlflow import CausalLM, PerSample, Rollout, node
from rlflow.state import ReplayBuffer
from rlflow.types import Ragged
from tests.controller.runs import SGD, ZERO2, Fit, OddCharacters, RaggedGRPO, StopsAfter, failing_fit, fit, sums
from tests.ranks import RankPool


class Replays(RaggedGRPO):
    """Keeps the last ten responses, and a tensor of its own; records what each step draws of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replay = ReplayBuffer(10)
        self.seen = torch.zeros(2, dtype=torch.float64)
        self.record: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state.pop("seen")
        super().load_state_dict(state)

    @node
    def keep(self, rollout: Rollout, rewards: PerSample) -> None:
        responses = Ragged(rollout.response_ids[rollout.loss_mask], rollout.lengths)
        self.replay.add(self.all_rows(rollout.prompt_ids), self.all_rows(responses))
        self.seen = self.seen + torch.stack([self.mean(rewards), self.mean(rollout.lengths.double())])
        drawn = self.replay.sample(rollout.group)
        self.record.append(self.all_rows((drawn.response_ids * 7 % 101).sum(dim=1)).tolist())


class Hooks(Replays):
    """Keeps the same by the hooks of Lightning's modules."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"replay": self.replay.state_dict(), "seen": self.seen, "steps": [len(self.record)]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.replay.load_state_dict(checkpoint["replay"])
        self.seen = checkpoint["seen"]
        self.record.append(checkpoint["steps"])


class Unsaved(Replays):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kinds"] = {"a set"}


class Apart(Replays):
    """Each rank keeps what it has itself."""

    @node
    def keep(self, rollout: Rollout, rewards: PerSample) -> None:
        self.seen = self.seen + rollout.lengths.sum() + rollout.group[0]


def run(policy: Path, folder: Path, kind: type[Replays] = Replays, strategy: Any = None, **settings: Any) -> Fit:
    module = kind(CausalLM(str(policy), optimizer=SGD), OddCharacters(), group_size=2, max_response_length=6)
    given = {"max_steps": 4, "save_every_n_steps": 2, **settings}
    return Fit(module, sums(16, 2), folder, settings=given, **({} if strategy is None else {"strategy": strategy}))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Tensors of the module in the last checkpoint."""
    (*_, last) = sorted((folder / "checkpoint").iterdir())
    (file,) = last.glob("module-state-*.safetensors")
    return load_file(file)


def test_a_replay_buffer_is_alike_on_two_ranks_and_after_a_checkpoint(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    alone = fit(run(policy, tmp_path / "alone"))
    expected = tensors_in(tmp_path / "alone")
    assert set(expected) == {f"replay/{name}" for name in filled_names()} | {"seen"}
    assert len(expected["replay/prompt_lengths"]) == 10
    for result in ranks2.run(fit, run(policy, tmp_path / "two", strategy=ZERO2)):
        assert result.record == alone.record
    found = tensors_in(tmp_path / "two")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name != "seen")
    torch.testing.assert_close(found["seen"], expected["seen"])
    first = fit(run(policy, tmp_path / "parts", callbacks=[StopsAfter(2)]))
    second = fit(run(policy, tmp_path / "parts", ckpt_path="last", callbacks=[StopsAfter(99)]))
    assert first.record + second.record == alone.record
    found = tensors_in(tmp_path / "parts")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_on_save_checkpoint_adds_is_what_on_load_checkpoint_gets(policy: Path, tmp_path: Path) -> None:
    alone = fit(run(policy, tmp_path / "alone", Hooks))
    first = fit(run(policy, tmp_path / "parts", Hooks, callbacks=[StopsAfter(2)]))
    second = fit(run(policy, tmp_path / "parts", Hooks, ckpt_path="last", callbacks=[StopsAfter(99)]))
    assert [*first.record, [2], *second.record[1:]] == [*alone.record[:2], second.record[0], *alone.record[2:]]
    straight, found = tensors_in(tmp_path / "alone"), tensors_in(tmp_path / "parts")
    assert "on_save_checkpoint.seen" in straight
    assert all(torch.equal(found[name], tensor) for name, tensor in straight.items())


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(policy: Path, tmp_path: Path) -> None:
    result = failing_fit(run(policy, tmp_path, Unsaved))
    assert "`on_save_checkpoint.kinds` cannot be saved in a checkpoint (Object of type set" in result.error
    assert not result.steps


def filled_names() -> list[str]:
    return list(ReplayBuffer(1).state_dict())


def test_a_tensor_that_ranks_change_differently_is_refused_when_it_is_saved(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    for result in ranks2.run(failing_fit, run(policy, tmp_path, Apart, ZERO2)):
        assert "`seen` of the module's state is one tensor on rank 0 and another on rank 1" in result.error
