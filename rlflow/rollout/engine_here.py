"""What engines in the rank's own process have in common: what they check before they generate and after they load."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.rollout.engine import NO_VERSION, Completion, RolloutEngine, Sampling, SyncReport
from rlflow.rollout.manifest import Manifest, Piece, WeightSyncError


class EngineHere(RolloutEngine):
    """An engine in this process."""

    _to_hold_more: str = "take a model of longer context"  # for a message

    # Of the engine that `setup` built
    _pieces: Sequence[Piece]
    _dtype: torch.dtype
    _context: int | None  # tokens of the longest prompt and response together; None without a limit

    def check_context(self, prompt: int, response: int) -> None:
        if self._context is not None and prompt + response > self._context:
            raise UserError(
                f"a prompt of {prompt} tokens and a response of up to {response} exceed the engine's context of"
                f" {self._context} tokens; lower `data.max_prompt_length` or `module.max_response_length`, or"
                f" {self._to_hold_more}"
            )

    def pieces(self) -> Sequence[Piece]:
        return self._pieces

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, version: int
    ) -> list[Completion]:
        self._check(version, prompts, sampling.limits_of(len(prompts)))
        return self._generate(prompts, seeds, sampling) if prompts else []

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        start = time.perf_counter()
        self.policy_version = NO_VERSION  # what a sync leaves behind that fails midway is no version
        manifest = Manifest(self._pieces, self._dtype)
        self._load(manifest.watch(buckets))
        manifest.check(self._held())
        self.policy_version = version
        return SyncReport(version, manifest.tensors, manifest.nbytes, time.perf_counter() - start)

    def _check(self, version: int, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Refuse weights of another version, and responses that do not fit."""
        if version != self.policy_version:
            held = f"version {self.policy_version}" if self.policy_version != NO_VERSION else "no version"
            raise WeightSyncError(
                f"policy version {version} shall generate and the engine holds {held}; sync the weights first"
            )
        self.check_context(*max(zip(map(len, prompts), limits, strict=True), key=sum, default=(0, 0)))

    @abstractmethod
    def _generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]: ...

    @abstractmethod
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load full tensors of the engine's dtype, and forget all that was computed with older ones."""

    @abstractmethod
    def _held(self) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece as the engine now computes with it."""
