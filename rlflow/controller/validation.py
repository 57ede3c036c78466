"""Validation: sample responses to every held-out prompt, score them, and average; or as the module says itself.

The graph is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlflow.controller.context import NodeContext, Running
from rlflow.dag.node import Node
from rlflow.data.loader import Loader
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.functional import pass_at_k
from rlflow.metrics import Metrics
from rlflow.module import RLModule
from rlflow.rewards.reward import scored
from rlflow.rollout.engine import RolloutEngine, Sampling
from rlflow.rollout.sampling import sample
from rlflow.values.batch import Batch
from rlflow.values.columns import to_device
from rlflow.values.layout import Layout

FULL_REWARD = 1.0
DRAW = 0  # the same seeds at every validation, so that a difference is the policy's


def validate(
    module: RLModule,
    engine: RolloutEngine | None,
    loader: Loader,
    transport: Transport,
    layout: Layout,
    *,
    samples: int,
    seed: int,
    version: int,
    stop_token_ids: tuple[int, ...],
    decode: Callable[[Sequence[int]], str],
) -> dict[str, float]:
    """`samples` responses to each prompt at the module's temperature, and one at temperature 0.

    Ranks outside `layout` only learn the result.

    Returns:
        `val/reward`, `val/length`, `val/truncated` and `val/accuracy`, the share of responses with a reward of at
        least 1; the same under `val_greedy/`; with several samples `val/pass@k` for each power of two up to their
        number. Equal on every rank.
    """
    assert module.reward is not None
    metrics = Metrics()
    if transport.rank not in layout.ranks:
        return metrics.reduce(transport)
    assert engine is not None
    batch, ids = loader.all(layout.shard(transport.rank), layout.shards)
    for prefix, temperature, n in (("val", module.temperature, samples), ("val_greedy", 0.0, 1)):
        sampling = Sampling(module.max_response_length, temperature, stop_token_ids)
        rollout = sample(
            engine, batch, ids.tolist(), n, sampling, seed=seed, draw=DRAW, node=prefix, version=version, decode=decode
        )
        if not layout.publishes(transport.rank):
            continue
        scores = torch.tensor(scored(module.reward, rollout.texts, rollout.rows).total, dtype=torch.float64)
        rows = float(len(scores))
        right = scores >= FULL_REWARD
        metrics.mean(f"{prefix}/reward", scores.sum(), rows)
        metrics.mean(f"{prefix}/accuracy", right.sum(), rows)
        metrics.mean(f"{prefix}/length", rollout.lengths.sum(), rows)
        metrics.mean(f"{prefix}/truncated", (~rollout.finished).sum(), rows)
        correct = right.reshape(-1, n).sum(dim=1)  # [B]
        for k in powers_of_two(n) if n > 1 else ():
            metrics.mean(f"{prefix}/pass@{k}", pass_at_k(correct, n, k).sum(), rows / n)
    return metrics.reduce(transport)


@torch.no_grad()
def run_validation_step(
    module: RLModule, context: NodeContext, loader: Loader, transport: Transport, layout: Layout, device: torch.device
) -> dict[str, float]:
    """What the module's `validation_step` logs of all held-out rows, equal on every rank."""
    metrics = Metrics()
    if transport.rank not in layout.ranks:
        return metrics.reduce(transport)
    batch, ids = loader.all(layout.shard(transport.rank), layout.shards)
    lengths = batch.lengths if isinstance(batch, Batch) else torch.zeros_like(ids)
    name = RLModule.validation_step.__name__
    space = RowSpace.gather(name, transport, layout, ids=ids, groups=ids, lengths=lengths, tokens=batch.tokens)
    node = Node(name, inputs=(), role=None, kind="compute", returns=Any, rows=None, file="", line=0)
    with context.measuring(metrics, Running(node, space, layout, draw=DRAW, version=0)):
        module.validation_step(to_device(batch, device))
    return metrics.reduce(transport)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length())]
