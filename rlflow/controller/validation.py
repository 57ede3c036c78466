"""Validation: scores of responses to held-out prompts, the loss of held-out responses, or `validation_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlflow.context.conversations import ConverseCall, measure_turns
from rlflow.context.generation import pictures_of
from rlflow.context.node_context import Running
from rlflow.controller.run import Run
from rlflow.dag.node import BATCH, Node
from rlflow.databuffer.rows import RowSpace
from rlflow.errors import UserError
from rlflow.functional import loss_count, loss_sum, loss_weights, pass_at_k
from rlflow.memory.out_of_memory import memory_watched, to_generate, to_score
from rlflow.metrics import Metrics, StepMetrics
from rlflow.models.causal_lm import CausalLM
from rlflow.module import RLModule, aggregation_of, environments, handles, has_validation_step
from rlflow.process.status import report
from rlflow.rewards.reward import BEST_REWARD, RewardInput
from rlflow.rollout.conversation import Conversation
from rlflow.rollout.engine import Sampling
from rlflow.rollout.sampling import sample
from rlflow.values.batch import Batch
from rlflow.values.columns import to_device
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath
from rlflow.values.rollout import Rollout

Masks = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Tensor]]
POLICY = "actor"  # name of the policy that is validated in calls below
DRAW = 0  # the same seeds at every validation, so that only the policy makes a difference


Scored = Callable[[str, Tensor, Rollout, Tensor], None]


def measure(run: Run, version: int, done: int = 0, draws: int = 0) -> dict[str, float]:
    """Metrics of the held-out rows, equal on every rank: of sampled responses, and of the rows themselves.

    Args:
        run: The run on this rank.
        version: Version of the policy's weights.
        done: Number of steps trained before; passed to rewards.
        draws: Number of draws of prompts before; passed to rewards.
    """
    report(run.rank, "validation")
    strategy, metrics = run.strategy, dict[str, float]()
    if run.scores_validation:
        with memory_watched("validation, generating", partial(to_generate, strategy, run.validating), strategy):
            metrics = score_responses(run, version, done, draws)
    if has_validation_step(run.module) or run.loss_node is not None:
        with memory_watched("validation, scoring", partial(to_score, strategy), strategy):
            of_rows = score_rows(run)
        require_other_names(metrics, of_rows)
        metrics |= of_rows
    return metrics


def require_other_names(metrics: Mapping[str, float], of_rows: Mapping[str, float]) -> None:
    """Refuse names of `validation_step` under which there are metrics already."""
    if taken := sorted(metrics.keys() & of_rows.keys()):
        raise UserError(
            f"`self.log` has the name {taken[0]!r} in `validation_step`, under which rlflow logs a metric of its own;"
            " take another"
        )


def score_responses(
    run: Run, version: int, done: int = 0, draws: int = 0, on_scored: Scored | None = None
) -> dict[str, float]:
    """Metrics of responses: `val_samples` for each held-out prompt, see `held_out_sampling`, and one at temperature 0.

    Ranks that do not generate only receive the result. If the module has an environment, responses are conversations,
    and the environment's rewards are part of theirs. In a game of several seats, the reward is that of the first seat:
    over all seats it would cancel out if one wins what another loses.

    Args:
        run: The run on this rank.
        version: Version of the policy's weights.
        done: Number of steps trained before; passed to rewards.
        draws: Number of draws of prompts before; passed to rewards.
        on_scored: Called with `val` and then `val_greedy`, this rank's ids of prompts `[B]`, its `B * n` responses and
            their scores `[B * n]`, on ranks whose rows count. None for nothing.

    Returns:
        By name, each under `val/` and, for responses at temperature 0, under `val_greedy/`; `reward`, `accuracy` and
        `pass@k` of each dataset of a mixture too, under `val/<dataset>/`:

        reward, length, truncated    means over responses
        accuracy                     share of responses with a reward of at least 1
        errors                       number of samples on which the reward failed, which count as 0
        pass@k                       with several samples, for each power of two up to their number
        turns, tool_calls, tool_errors    for conversations
        reward_<seat>                for games
    """
    module, transport, layout, loader = run.module, run.transport, run.generating, run.validation
    environment = next(iter(environments(module).values()), None)
    all_metrics = Metrics()
    if transport.rank not in layout.ranks:
        return all_metrics.reduce(0, transport)
    metrics, engine = all_metrics.of(0), run.validating
    assert engine is not None
    assert loader is not None
    batch, ids = loader.all(layout.shard(transport.rank), layout.shards)
    path = RowPath(ids[:, None], (BATCH,))
    sampled = held_out_sampling(run)
    greedy = replace(sampled, temperature=0.0)
    own = loader.own_settings(batch.rows)
    of_prompts = {"val": own, "val_greedy": [replace(each, sampling=None) for each in own]}
    for prefix, sampling, n in (("val", sampled, run.settings.val_samples), ("val_greedy", greedy, 1)):
        ended: list[Conversation] = []
        if environment is None:
            rollout = sample(
                engine,
                batch,
                path,
                n,
                sampling,
                seed=run.settings.seed,
                draw=DRAW,
                node=prefix,
                version=version,
                decode=run.decode,
                pictures=pictures_of(batch, run.album),
                of_prompts=of_prompts[prefix],
            )
        else:
            assert run.context.conversations is not None
            call = ConverseCall(DRAW, prefix, POLICY, {POLICY: version}, layout, rows_of=loader.rows_of_all)
            rollout, ended, _ = run.context.conversations.run(
                {POLICY: engine}, environment, batch.rows, path, n, sampling, call, pictures=batch.pictures
            )
        speaks = layout.is_leader(transport.rank)
        of_rank = run.context.reward_input(rollout, done, draws) if speaks else RewardInput([], [])
        scored = None if module.scorer is None else run.context.scores_of(module.scorer, of_rank, layout.ranks)
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
        counted = (rollout.seat == 0) & (rollout.branch == 0)  # an agent's episode counts once
        log_scores(prefix, of_all[counted], n, metrics)
        if on_scored is not None:
            on_scored(prefix, ids, rollout, of_all)
        for dataset, of_it in loader.masks(rollout.rows).items():
            log_scores(f"{prefix}/{dataset}", of_all[counted & of_it], n, metrics)
        metrics.mean(f"{prefix}/length", rollout.policy_lengths.sum(), float(len(of_all)))
        metrics.mean(f"{prefix}/truncated", (~rollout.finished).sum(), float(len(of_all)))
    return all_metrics.reduce(0, transport)


def held_out_sampling(run: Run) -> Sampling:
    """The sampling of held-out responses: by `trainer.val_sampling`, or else as the policy samples in steps."""
    name, own = run.follows or "", run.settings.val_sampling
    policy = handles(run.module)[name]
    assert isinstance(policy, CausalLM)
    temperature, truncation = (policy.temperature, policy.truncation) if own is None else (own.temperature, own)
    return Sampling(run.module.max_response_length, temperature, run.stop_token_ids[name], truncation=truncation)


def log_scores(prefix: str, scores: Tensor, n: int, metrics: StepMetrics) -> None:
    """Log mean scores `[B * n]` of `n` consecutive responses to each prompt, the share that is right, and pass@k."""
    rows, right = float(len(scores)), scores >= BEST_REWARD
    metrics.mean(f"{prefix}/reward", scores.sum(), rows)
    metrics.mean(f"{prefix}/accuracy", right.sum(), rows)
    correct = right.reshape(-1, n).sum(dim=1)  # [B]
    for k in powers_of_two(n) if n > 1 else ():
        metrics.mean(f"{prefix}/pass@{k}", pass_at_k(correct, n, k).sum(), rows / n)


@torch.no_grad()
def score_rows(run: Run) -> dict[str, float]:
    """Metrics of all held-out rows: those that the module's `validation_step` logs, or the loss of a train node."""
    module, transport, loader, lead = run.module, run.transport, run.validation, run.layouts[run.lead]
    assert loader is not None
    layout, all_metrics = Layout(lead.ranks, lead.shards), Metrics()
    if transport.rank not in layout.ranks:
        return _reduced(run, all_metrics)
    metrics = all_metrics.of(0)
    rows, ids = loader.all(layout.shard(transport.rank), layout.shards)
    lengths = rows.lengths if isinstance(rows, Batch) else torch.zeros_like(ids)
    name = RLModule.validation_step.__name__
    space = RowSpace.gather(name, transport, layout, path=ids[:, None], lengths=lengths, tokens=rows.tokens)
    node = run.loss_node or Node(name, inputs=(), role=None, kind="compute", returns=Any, file="", line=0)
    batch = to_device(rows, run.strategy.root_device)
    logged = metrics if run.loss_node is None else Metrics().of(0)  # the train node's own metrics are dropped
    with run.context.within(Running(node, space, layout, DRAW, {}, logged, validates=run.loss_node is None)):
        if run.loss_node is None:
            module.validation_step(batch)
        else:
            counts = layout.is_leader(transport.rank)
            measure_loss(module, run.loss_node, batch, metrics, counts, loader.masks)
    return _reduced(run, all_metrics)


def _reduced(run: Run, metrics: Metrics) -> dict[str, float]:
    """The metrics over all ranks."""
    found = metrics.reduce(0, run.transport)
    run.context.learn_names(metrics)
    return found


def measure_loss(
    module: RLModule, node: Node, batch: Batch, metrics: StepMetrics, counts: bool, masks: Masks = lambda rows: {}
) -> None:
    """Log `val/loss`, the loss of a train node as in training, and for a language model `val/token_accuracy`.

    The latter is the share of response tokens in the loss mask that are the likeliest token at their place. Sums over
    the rows of all ranks are divided at the end, so neither depends on the number of ranks and micro-batches.

    Args:
        module: The algorithm.
        node: Train node of the module that reads only `batch`.
        batch: This rank's rows.
        metrics: Metrics to which the numbers are logged.
        counts: Whether this rank's rows count; among peers with the same rows, those of one rank do.
        masks: Rows of a mixture to which of them are of each dataset, see `Loader.masks`; both are logged of each.
    """
    assert node.role is not None
    handle = handles(module)[node.role]
    mode = aggregation_of(module, handle)
    loss: Tensor = getattr(module, node.id)(batch=batch)
    likeliest = handle.topk(batch, 1)[1][..., 0] if isinstance(handle, CausalLM) else None  # [B, T]
    if not counts:
        return
    every = torch.ones(len(batch.rows), dtype=torch.bool)
    for name, of_it in {"": every, **masks(batch.rows)}.items():
        prefix = f"val/{name}" if name else "val"
        rows = of_it.to(loss.device)
        tokens = batch.loss_mask[rows]
        mask = tokens.any(dim=1) if loss.dim() == 1 else tokens
        total = loss_sum(loss[rows].double(), loss_weights(mask, mode, module.max_response_length))
        metrics.mean(f"{prefix}/loss", total, loss_count(mask, mode))
        if likeliest is not None:
            right = (likeliest == batch.response_ids)[rows] & tokens
            metrics.mean(f"{prefix}/token_accuracy", right.sum(), tokens.sum())


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length())]
