"""Validation: sample responses to every held-out prompt, score them, and average; or as the module says itself.

The graph is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlflow.controller.context import NodeContext, Running
from rlflow.controller.conversation_metrics import measure_turns
from rlflow.controller.conversations import ConversationRunner, ConverseCall
from rlflow.controller.scoring import scored_alike
from rlflow.dag.node import BATCH, Node
from rlflow.data.loader import Loader
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.functional import pass_at_k
from rlflow.metrics import Metrics
from rlflow.module import RLModule, environments
from rlflow.rewards.reward import RewardInput
from rlflow.rollout.conversation import Conversation
from rlflow.rollout.engine import RolloutEngine, Sampling
from rlflow.rollout.sampling import sample
from rlflow.values.batch import Batch
from rlflow.values.columns import to_device
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath
from rlflow.values.rollout import Rollout

FULL_REWARD = 1.0
POLICY = "actor"  # how the policy that is validated is called within
DRAW = 0  # the same seeds at every validation, so that a difference is the policy's


def validate(
    module: RLModule,
    engine: RolloutEngine | None,
    loader: Loader,
    transport: Transport,
    layout: Layout,
    *,
    samples: int,
    temperature: float,
    seed: int,
    version: int,
    stop_token_ids: tuple[int, ...],
    decode: Callable[[Sequence[int]], str],
    reward_input: Callable[[Rollout], RewardInput],
    conversations: ConversationRunner | None = None,
) -> dict[str, float]:
    """`samples` responses to each prompt at the policy's `temperature`, and one at temperature 0.

    Ranks outside `layout` only learn the result. Where the module has an environment, responses are conversations, and
    what it gave is part of their reward. Of a game of several seats, rewards are those of the first: over all seats
    they cancel out where one wins what the other loses.

    Returns:
        `val/reward`, `val/length`, `val/truncated` and `val/accuracy`, the share of responses with a reward of at
        least 1; `val/errors`, the samples that the reward failed on, which count 0; the same under `val_greedy/`; with
        several samples `val/pass@k` for each power of two up to their number; of conversations `val/turns`,
        `val/tool_calls` and `val/tool_errors`; and of games `val/reward_<seat>`. Equal on every rank.
    """
    environment = next(iter(environments(module).values()), None)
    all_metrics = Metrics()
    if transport.rank not in layout.ranks:
        return all_metrics.reduce(0, transport)
    metrics = all_metrics.of(0)
    assert engine is not None
    batch, ids = loader.all(layout.shard(transport.rank), layout.shards)
    path = RowPath(ids[:, None], (BATCH,))
    for prefix, of_prefix, n in (("val", temperature, samples), ("val_greedy", 0.0, 1)):
        sampling = Sampling(module.max_response_length, of_prefix, stop_token_ids)
        ended: list[Conversation] = []
        if environment is None:
            rollout = sample(
                engine, batch, path, n, sampling, seed=seed, draw=DRAW, node=prefix, version=version, decode=decode
            )
        else:
            assert conversations is not None
            call = ConverseCall(DRAW, prefix, POLICY, {POLICY: version}, layout, rows_of=loader.rows_of_all)
            rollout, ended, _ = conversations.run({POLICY: engine}, environment, batch.rows, path, n, sampling, call)
        speaks = layout.publishes(transport.rank)
        of_rank = reward_input(rollout) if speaks else RewardInput([], [])
        scored = None if module.scorer is None else scored_alike(module.scorer, of_rank, layout.ranks, transport)
        if not speaks:
            continue
        if ended:
            measure_turns(prefix, ended, metrics)
        of_all = rollout.returns.double().sum(dim=1)  # [B]
        if scored is not None:
            of_all += torch.tensor(scored.total, dtype=torch.float64)
            metrics.sum(f"{prefix}/errors", float(len(scored.failed)))
        seats = ("",) if environment is None else environment.seats_of(POLICY, {})
        for number, seat in enumerate(seats if len(seats) > 1 else ()):
            of_seat = of_all[rollout.seat == number]
            metrics.mean(f"{prefix}/reward_{seat}", of_seat.sum(), float(len(of_seat)))
        scores = of_all[rollout.seat == 0]
        rows = float(len(scores))
        right = scores >= FULL_REWARD
        metrics.mean(f"{prefix}/reward", scores.sum(), rows)
        metrics.mean(f"{prefix}/accuracy", right.sum(), rows)
        metrics.mean(f"{prefix}/length", rollout.policy_lengths.sum(), float(len(of_all)))
        metrics.mean(f"{prefix}/truncated", (~rollout.finished).sum(), float(len(of_all)))
        correct = right.reshape(len(path), n).sum(dim=1)  # [B]
        for k in powers_of_two(n) if n > 1 else ():
            metrics.mean(f"{prefix}/pass@{k}", pass_at_k(correct, n, k).sum(), rows / n)
    return all_metrics.reduce(0, transport)


@torch.no_grad()
def run_validation_step(
    module: RLModule, context: NodeContext, loader: Loader, transport: Transport, layout: Layout, device: torch.device
) -> dict[str, float]:
    """What the module's `validation_step` logs of all held-out rows, equal on every rank."""
    all_metrics = Metrics()
    if transport.rank not in layout.ranks:
        return all_metrics.reduce(0, transport)
    metrics = all_metrics.of(0)
    batch, ids = loader.all(layout.shard(transport.rank), layout.shards)
    lengths = batch.lengths if isinstance(batch, Batch) else torch.zeros_like(ids)
    name = RLModule.validation_step.__name__
    space = RowSpace.gather(name, transport, layout, path=ids[:, None], lengths=lengths, tokens=batch.tokens)
    node = Node(name, inputs=(), role=None, kind="compute", returns=Any, file="", line=0)
    with context.measuring(Running(node, space, layout, draw=DRAW, versions={}, metrics=metrics)):
        module.validation_step(to_device(batch, device))
    return all_metrics.reduce(0, transport)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length())]
