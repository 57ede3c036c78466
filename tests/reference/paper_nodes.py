"""The nodes of an algorithm, run one by one on a seeded batch that a real model scores; other values are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow import CausalLM, PerToken, RLModule, Rollout
from rlflow.context.node_context import Running
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.functional import aggregate
from rlflow.metrics import StepMetrics
from rlflow.models.handle import ForwardPlan
from rlflow.run.prepare import read_graph
from rlflow.values.batch import Batch as Rows
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged
from tests.algorithm_factory import made
from tests.node_context import node_context
from tests.reference.paper_batches import LENGTHS, Batch, batch

HERE = Layout((0,), 1)


@dataclass(frozen=True)
class Step:
    """The values of the nodes.

    Attributes:
        values: Values of every node that ran or was given, by name.
        nodes: The graph's, by name.
        loss: Loss of the actor, aggregated as the algorithm does.
        gradient: Gradient of it with respect to the logprobs, `[B, T]`.
    """

    values: dict[str, Any]
    nodes: set[str]
    loss: Tensor
    gradient: Tensor


class KeepsLogprobs:
    """Keeps the gradient to the logprobs that the model gave the loss."""

    logprobs: Tensor

    def surrogate(self, logprobs: PerToken, *given: Any) -> Tensor:
        logprobs.retain_grad()
        self.logprobs = logprobs
        loss: Tensor = super().surrogate(logprobs, *given)  # type: ignore[misc]
        return loss


def scored_batch(seed: int, policy: Path) -> tuple[Batch, Rollout]:
    """The batch of a seed around logprobs of a real model, and its responses as a rollout."""
    made = batch(seed)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 90, made.mask.shape, generator=draw).masked_fill(~made.mask, 0)
    prompts = Ragged.from_lists([[3 + i % 5, 7] for i in range(len(LENGTHS))])
    rows: list[dict[str, Any]] = [{} for _ in LENGTHS]
    actor = CausalLM(str(policy), trainable=False)
    actor.attach(actor.load(policy, torch.float64, torch.device("cpu")), ForwardPlan())
    log_pi = actor.logprobs(Rows(prompts, ids, made.mask, made.lengths, rows)).detach()
    moved = log_pi - made.log_pi  # of the tokens; all policies move along, and none beyond a probability of 1
    shifted = {name: (getattr(made, name) + moved).clamp(max=-1e-3) for name in ("log_old", "log_mu", "log_ref")}
    data = replace(made, log_pi=log_pi, **shifted)
    rollout = Rollout(
        prompt_ids=prompts,
        response_ids=ids,
        loss_mask=data.mask,
        lengths=data.lengths,
        logprobs=data.log_mu,
        finished=torch.ones(len(LENGTHS), dtype=torch.bool),
        path=RowPath.of_groups(data.group),
        version=torch.zeros_like(data.lengths),
        versions=torch.zeros_like(ids, dtype=torch.int32),
        ended=torch.zeros_like(data.lengths),
        texts=["" for _ in LENGTHS],
        rows=rows,
    )
    return data, rollout


def step(algorithm: type[RLModule], policy: Path, given: Mapping[str, Any], **settings: Any) -> Step:
    """Every node of the actor and of no role, in order, but those that are given; then the actor's loss."""
    kept = type(algorithm.__name__, (KeepsLogprobs, algorithm), {})
    module = made(kept, policy, **settings)
    module.configure_models()
    graph = read_graph(module)
    module.actor.attach(module.actor.load(policy, torch.float64, torch.device("cpu")), ForwardPlan())
    context = node_context()
    module.attach(context)
    values = dict(given)
    rollout = values["rollout"]
    ids = torch.arange(len(LENGTHS))
    space = RowSpace.gather("rows", Transport(), HERE, path=rollout.path.numbers, lengths=ids, tokens=ids)
    for node in graph.order:
        if node.id in values or node.role == "critic":
            continue
        context.running = Running(node, space, HERE, draw=0, versions={}, metrics=StepMetrics(0))
        reads = {name: values[name] for name in node.reads}
        if node.kind != "train":
            values[node.id] = getattr(module, node.id)(**reads)
            continue
        with module.actor.training():
            per_token = module.actor_loss(**reads)
    loss = aggregate(per_token, rollout.loss_mask, module.loss_aggregation, module.max_response_length)
    loss.backward()
    assert module.logprobs.grad is not None
    return Step(values, set(graph.nodes), loss.detach(), module.logprobs.grad)
