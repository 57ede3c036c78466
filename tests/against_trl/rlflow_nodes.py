"""rlflow's side: the nodes of an algorithm, run one after another on the recorded responses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlflow import Batch, CausalLM, RLModule, Rollout
from rlflow.context.node_context import Running
from rlflow.dag.node import Node
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.functional import aggregate
from rlflow.metrics import StepMetrics
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.models.packed import PackedModel
from rlflow.module import handles
from rlflow.rewards import SampleReward
from rlflow.run.prepare import read_graph
from rlflow.values.batch import Pairs
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged
from tests.against_trl.cases import GROUP, TEMPERATURE, Models, Result, pairs, points, prompt_ids, response_ids
from tests.node_context import node_context

HERE = Layout((0,), 1)


class Points(SampleReward):
    """`points` of the response."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return points(text)


def recorded_rollout(models: Models) -> Rollout:
    """The recorded responses, with the logprobs of `models.sampler`."""
    batch = recorded_batch()
    sampler = CausalLM(str(models.sampler), trainable=False, temperature=TEMPERATURE)
    _attach(sampler, models.sampler)
    return Rollout(
        prompt_ids=batch.prompt_ids,
        response_ids=batch.response_ids,
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        logprobs=sampler.logprobs(batch),
        finished=torch.tensor([ids[-1] == 0 for ids in response_ids()]),
        path=RowPath.of_groups(torch.arange(len(batch.rows) // GROUP).repeat_interleave(GROUP)),
        version=torch.zeros_like(batch.lengths),
        versions=torch.zeros_like(batch.response_ids, dtype=torch.int32),
        ended=torch.zeros_like(batch.lengths),
        texts=[bytes(ids).decode() for ids in response_ids()],
        rows=batch.rows,
    )


def recorded_batch() -> Batch:
    """The same prompts and responses as rows of a dataset."""
    responses = response_ids()
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in responses], batch_first=True)
    lengths = torch.tensor([len(ids) for ids in responses])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return Batch(Ragged.from_lists(prompt_ids()), padded, mask, lengths, [{} for _ in responses])


def recorded_pairs() -> Pairs:
    """The recorded pairs as rows of a dataset."""
    prompts, chosen, rejected = (Ragged.from_lists(side) for side in zip(*pairs(), strict=True))
    return Pairs(prompts, chosen, rejected, [{} for _ in range(len(prompts))])


def step(module: RLModule, recorded: Mapping[str, Any], start: Mapping[str, Path], policy: Path) -> Result:
    """One update of the trained role: every node in order, then the loss of all rows and its gradient.

    Args:
        module: The algorithm.
        recorded: `batch`, or the `rollout`, whose node is not run.
        start: The weights of each role when the step begins.
        policy: The weights of the trained role when its loss is computed.
    """
    graph = read_graph(module)
    models = handles(module)
    for role in graph.roles() - {"rollout"}:
        _attach(models[role], start[role])
    (rows,) = recorded.values()
    values = dict(recorded)
    context = node_context()
    module.attach(context)
    for node in graph.order:
        if node.id in values:
            continue
        context.running = _running(node, rows)
        given = {name: values[name] for name in node.reads}
        if node.kind != "train":
            values[node.id] = getattr(module, node.id)(**given)
            continue
        assert node.role is not None
        model = _attach(models[node.role], policy)
        with models[node.role].training():
            per_row = getattr(module, node.id)(**given)
    mask = torch.ones(len(rows.rows)) if isinstance(rows, Pairs) else rows.loss_mask
    loss = aggregate(per_row, mask, module.loss_aggregation, module.max_response_length)
    loss.backward()
    gradient = {model.hf_name(name): weight.grad for name, weight in model.named_parameters()}
    return Result(loss.item(), gradient, values.get("advantages"))


def _attach(handle: ModelHandle, weights: Path) -> PackedModel:
    model = handle.load(weights, torch.float64, torch.device("cpu"))
    handle.attach(model, ForwardPlan())
    return model


def _running(node: Node, rows: Batch | Rollout | Pairs) -> Running:
    ids = torch.arange(len(rows.rows))
    path = torch.stack([ids // GROUP, ids], dim=1)
    space = RowSpace.gather("rows", Transport(), HERE, path=path, lengths=ids, tokens=ids)
    return Running(node, space, HERE, draw=0, versions={}, metrics=StepMetrics(0))
