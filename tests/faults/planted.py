"""Faults of the product that raise no error, each planted in it while a run is in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import rlflow.rollout.vllm.engine as vllm_engine
from rlflow.callbacks import Callback
from rlflow.controller.weight_sync import WeightSync
from rlflow.models import handle
from rlflow.models.packing import ModelInput
from rlflow.models.weights import Weight
from rlflow.rollout.engine import InProcessEngine, RolloutEngine, Sampling, SyncReport
from rlflow.rollout.transformers import TransformersEngine
from rlflow.rollout.vllm import VLLMEngine
from rlflow.trainer import Trainer

Plant = Callable[[pytest.MonkeyPatch], None]
LEFT_OUT = "model.layers.0.self_attn.q_proj.weight"


class Planted(Callback):
    """Plants a fault after a step."""

    def __init__(self, plant: Plant, patch: pytest.MonkeyPatch, after: int) -> None:
        self.plant = plant
        self.patch = patch
        self.after = after

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        if step == self.after:
            self.plant(self.patch)


def a_sync_is_skipped(patch: pytest.MonkeyPatch) -> None:
    """And everything says that it was done."""

    def skipped(sync: WeightSync, version: int) -> SyncReport:
        assert sync.engine is not None
        sync.version = sync.engine.policy_version = version
        return SyncReport(version, 26, 0, 0.0)

    patch.setattr(WeightSync, "run", skipped)


def a_tensor_is_left_out(patch: pytest.MonkeyPatch) -> None:
    """Between what is sent and what is loaded."""
    for engine in (TransformersEngine, VLLMEngine):

        def load(self: Any, weights: Iterator[tuple[str, Tensor]], loads: Any = engine._load) -> None:
            loads(self, ((name, weight) for name, weight in weights if name != LEFT_OUT))

        patch.setattr(engine, "_load", load)


def the_engine_has_another_temperature(patch: pytest.MonkeyPatch) -> None:
    generate = InProcessEngine.generate

    def hotter(self: InProcessEngine, prompts: Any, seeds: Any, sampling: Sampling, version: int) -> Any:
        return generate(self, prompts, seeds, replace(sampling, temperature=1.1 * sampling.temperature), version)

    patch.setattr(InProcessEngine, "generate", hotter)


def the_prefix_cache_is_stale(patch: pytest.MonkeyPatch) -> None:
    """It is not reset, and what would keep its blocks from being found is gone."""
    from vllm import LLM

    patch.setattr(LLM, "reset_prefix_cache", lambda engine: True)
    whole = VLLMEngine._prompt
    patch.setattr(VLLMEngine, "_prompt", lambda *given: whole(*given) | {"cache_salt": SALT_BEFORE})


SALT_BEFORE = "3"  # of the syncs before the third step: the third's


def positions_are_wrong_after_packing(patch: pytest.MonkeyPatch) -> None:
    """The fault: positions are wrong where responses begin."""
    pack = handle.pack  # type: ignore[attr-defined]

    def moved(rows: Any, *_: Any) -> ModelInput:
        packed = pack(rows)  # each row whole
        positions, lengths = packed.position_ids[0].clone(), rows.prompt_ids.lengths.cpu()
        row = (positions == 0).cumsum(0) - 1
        there = lengths[rows.lengths.cpu() > 0][row]
        return replace(packed, position_ids=(positions + 7 * (positions >= there))[None])

    patch.setattr(handle, "pack", moved)


def positions_are_wrong_after_padding(patch: pytest.MonkeyPatch) -> None:
    """Positions of new tokens of a row whose prompt was padded, in the engine."""
    forward = TransformersEngine._forward

    def moved(self: Any, ids: Any, mask: Tensor, positions: Tensor, cache: Any, *more: Any) -> Any:
        of_width = positions if cache is None else positions * 0 + mask.shape[1] - 1
        return forward(self, ids, mask, of_width, cache, *more)

    patch.setattr(TransformersEngine, "_forward", moved)


def the_tied_head_is_not_refreshed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vllm_engine, "pack_heads_again", lambda model: None)


def experts_are_not_packed_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vllm_engine, "pack_again", lambda model: None)


def an_adapter_is_not_merged(patch: pytest.MonkeyPatch) -> None:
    def alone(self: Weight, whole: Any = lambda parameter: parameter.detach()) -> Tensor:
        weight: Tensor = whole(self.parameter)
        return weight

    patch.setattr(Weight, "value", alone)


def context_is_left_out(patch: pytest.MonkeyPatch) -> None:
    """The first 20 tokens of what a response is sampled after."""
    generate = InProcessEngine.generate

    def forgetful(self: InProcessEngine, prompts: Any, *given: Any) -> Any:
        return generate(self, [prompt[20:] for prompt in prompts], *given)

    patch.setattr(InProcessEngine, "generate", forgetful)


def made(kind: type[RolloutEngine]) -> RolloutEngine:
    """An engine of a class, small."""
    return VLLMEngine(kv_cache_gib=0.25) if kind is VLLMEngine else kind()
