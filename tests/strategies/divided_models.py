"""Run by the ranks of the tests: loading a model whole, or divided from the first byte."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ModelHandle
from rlflow.models.optimizer import Optimizer
from rlflow.process.freed_memory import return_freed_memory
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.values.layout import Layout
from tests.strategies.strategy_update import Stage, all_weights, backward, launch, rows_of, trained


def load(
    handle: ModelHandle, folder: Path, stage: Stage, precision: str, layout: Layout | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, object]] | None:
    """Weights, buffers and the record of a role as it is loaded, where it lives."""
    strategy = launch(stage, precision)
    if layout is not None:
        strategy.form_groups({"role": layout})
    if not strategy.holds("role"):
        return None
    strategy.setup_role("role", handle, folder)
    model = strategy.roles["role"].model
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    adapters = {name: weight.clone() for bucket in strategy._full(model.trained(), 1) for name, weight in bucket}
    return all_weights(strategy, "role") | adapters, buffers, strategy.roles["role"].model.untrained_record()


def refused(handle: ModelHandle, folder: Path, stage: Stage) -> str:
    """The error of a strategy about a model that it refuses."""
    try:
        launch(stage).setup_role("role", handle, folder)
    except UserError as refusal:
        return str(refusal)
    return "nothing"


def updates_with(
    folder: Path, stage: Literal[0, 1, 2, 3], optimizer: Optimizer, settings: dict[str, Any], frozen_too: bool = False
) -> Any:
    """The weights after two of the reference's updates; of a frozen role too, and whether ranks hold them twice."""
    strategy = DeepSpeedStrategy(stage, **settings)
    Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy.processes).launch()
    layout = Layout(tuple(range(dist.get_world_size())), min(2, dist.get_world_size()))
    strategy.form_groups({"actor": layout, "reference": layout})
    handle = trained(folder, optimizer)
    strategy.setup_role("actor", handle, folder)
    if frozen_too:
        frozen = CausalLM(str(folder), trainable=False)
        strategy.setup_role("reference", frozen, folder)
        for _ in range(2):
            frozen.logprobs(rows_of([0, 1]))
    for _ in range(2):
        handle.logprobs(rows_of([0, 1]))
        backward(strategy, "actor", handle)
        strategy.step("actor")
    weights = all_weights(strategy, "actor")
    if not frozen_too:
        return weights
    held: list[Any] = list(strategy.roles["reference"].model.parameters())
    second = all(each.ds_secondary_tensor is not None for each in held)
    return weights, all_weights(strategy, "reference"), second


def max_live_parameters(folder: Path, limit: int | None) -> tuple[int, int]:
    """The fewest and most elements that are gathered while a layer of a trained model computes, small ones apart."""
    strategy = DeepSpeedStrategy(3, max_live_parameters=limit)
    Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy.processes).launch()
    handle = trained(folder, Optimizer())
    strategy.setup_role("actor", handle, folder)
    model = strategy.roles["actor"].model
    large: list[Any] = [each for each in model.parameters() if not each.ds_persist]  # type: ignore[attr-defined]
    for _ in range(3):  # until DeepSpeed knows the order in which weights are used
        backward(strategy, "actor", handle)
        strategy.step("actor")
    seen: list[int] = []

    def count(*_: object) -> None:
        seen.append(sum(each.numel() for each in large))

    for module in model.model.get_decoder().layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(count)
            module.register_full_backward_pre_hook(count)
    backward(strategy, "actor", handle)
    return min(seen), max(seen)


def growth_while_loading(small: Path, large: Path, stage: Stage) -> tuple[int, int]:
    """Bytes by which this process's own memory grows at most while a frozen model is loaded, and of the whole model."""
    strategy = launch(stage)
    strategy.setup_role("small", CausalLM(str(small), trainable=False), small)  # all that is imported and kept for good
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    assert return_freed_memory()  # as runs do
    before, done, seen = _own_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(_own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    strategy.setup_role("large", CausalLM(str(large), trainable=False), large)
    done.set()
    watcher.join()
    model = strategy.roles["large"].model
    return max(seen) - before, sum(
        strategy._full_shape(each).numel() * each.element_size() for each in model.parameters()
    )


def _own_bytes() -> int:
    """Memory of this process that no file is behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
