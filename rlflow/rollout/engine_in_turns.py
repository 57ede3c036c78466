"""One engine for several policies in turns: it holds the weights of one of them at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from rlflow.rollout.engine import NO_VERSION, Completion, EnginePlace, RolloutEngine, Sampling, SyncReport
from rlflow.rollout.manifest import WeightSyncError
from rlflow.rollout.request import Turn


class EngineInTurns(RolloutEngine):
    """What one policy sees of an engine that it shares: nothing of the others but that they take its turn.

    A sync of one policy ends the version of the others. `engine` is set up and closed once for all, and not by this.

    Args:
        policy: Whose it is, in messages.
        engine: The shared one.
        turns: Of all policies that share it, filled here: by name.
    """

    def __init__(self, policy: str, engine: RolloutEngine, turns: dict[str, EngineInTurns]) -> None:
        self.tensor_parallel_size = engine.tensor_parallel_size
        self.needs_all_ranks = engine.needs_all_ranks
        self._policy = policy
        self._engine = engine
        self._turns = turns
        turns[policy] = self

    def setup(self, model_path: str, place: EnginePlace) -> None:
        raise AssertionError("a shared engine is set up by itself")

    def close(self) -> None:
        raise AssertionError("a shared engine is closed by itself")

    def check_context(self, prompt: int, response: int) -> None:
        self._engine.check_context(prompt, response)

    def memory_settings(self, on_cpu: bool) -> tuple[str, ...]:
        return self._engine.memory_settings(on_cpu)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, version: int
    ) -> list[Completion]:
        self._check(version)
        return self._engine.generate(prompts, seeds, sampling, version)

    def step(self, new: Mapping[int, Turn], sampling: Sampling, version: int) -> dict[int, Completion]:
        self._check(version)
        return self._engine.step(new, sampling, version)

    def abort(self) -> None:
        self._engine.abort()

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        for other in self._turns.values():  # what a sync leaves behind that fails midway is no version of anyone
            other.policy_version = NO_VERSION
        report = self._engine.update_weights(buckets, version)
        self.policy_version = version
        return report

    def sleep(self, keep_weights: bool = False) -> None:
        """Give the engine's memory back, unless another policy has its turn: then that one's `sleep` does."""
        if any(other.policy_version != NO_VERSION for other in self._turns.values() if other is not self):
            return
        super().sleep(keep_weights)
        self._engine.sleep(keep_weights)

    def wake_up(self) -> None:
        self._engine.wake_up()

    def _check(self, version: int) -> None:
        if version != self.policy_version:
            raise WeightSyncError(
                f"version {version} of `{self._policy}` shall generate and the engine that it shares holds"
                f" {self._held()}; sync the weights of `{self._policy}` first"
            )

    def _held(self) -> str:
        held = {policy: of.policy_version for policy, of in self._turns.items() if of.policy_version != NO_VERSION}
        return next((f"version {version} of `{policy}`" for policy, version in held.items()), "no version")
