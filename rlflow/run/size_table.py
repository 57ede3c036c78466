"""What the sizes of a config come to: prompts, samples and updates, a line each, before the first step."""

from __future__ import annotations

from rlflow.controller.run import Run
from rlflow.dag.tasks import rank_ranges
from rlflow.module import handles
from rlflow.run.schedules import updates_per_step
from rlflow.values.layout import Layout


def size_table(run: Run) -> list[str]:
    """The batch sizes that follow from the configuration, a line each."""
    module, data = run.module, run.data
    world_size, token_budget = run.settings.machines.world_size, run.strategy.token_budget
    prompts, samples = data.prompts_per_step, data.prompts_per_step * module.group_size
    rollout = run.generating
    lines = [
        f"ranks {world_size}, steps {run.steps}, training rows {run.train.size},"
        f" validation rows {run.validation.size if run.validation else 0}",
        f"per step: {prompts} prompts x {module.group_size} = {samples} samples;"
        f" per rank about {prompts / rollout.shards:g} prompts, {samples / rollout.shards:g} samples"
        f"{_where(rollout, world_size)}",
    ]
    for role in sorted(run.graph.trained_roles()):
        updates = updates_per_step(module, run.graph, role, prompts)
        of, layout = handles(module)[role].samples_per_update or samples, run.layouts[role]
        start = handles(module)[role].start_step
        count = "some" if updates is None else updates
        lines.append(
            f"{role}: {count} update(s) per step of {of} samples, about {of / layout.shards:g} per rank"
            f"{_where(layout, world_size)}, in micro-batches of at most {token_budget} tokens"
            f"{f', from step {start + 1} on' if start else ''}"
        )
    if run.graph.filter is not None:
        filled = f"filter {run.graph.filter.id}: {prompts} prompts a draw until a step has {prompts} groups"
        lines.append(f"{filled}, at most {module.max_draws} draws")
    elif run.plan.fill is not None:
        lines.append(f"long responses are cut off: {prompts} prompts a draw until {prompts} groups have ended")
    dropped = run.train.scan.dropped
    if dropped:
        lines.append(f"dropped {dropped} overlong training rows")
    return lines + unclipped(run)


def unclipped(run: Run) -> list[str]:
    """A warning, where a loss that nothing holds near the policy that sampled meets samples of older weights."""
    module, prompts_per_step = run.module, run.data.prompts_per_step
    graph = run.graph
    updates = max(updates_per_step(module, graph, role, prompts_per_step) or 2 for role in graph.trained_roles())
    staleness, ignores = run.plan.max_staleness, module.ignores_sampler
    stale = {
        f"`trainer.max_staleness` is {staleness}": ignores and staleness > 0,
        "`trainer.partial_rollout` continues responses with newer weights": ignores and run.plan.cuts_off,
        f"a step makes {updates} updates": module.unclipped and updates > 1,
    }
    return [
        f"warning: {why}, and the loss of {type(module).__name__} has no clip, cap or mask that holds the policy near"
        f" the one that sampled; {_WHAT_HOLDS}"
        for why, holds in stale.items()
        if holds
    ][:1]


_WHAT_HOLDS = (
    "set `importance` with `anchor: old`, or take DPPO, OffPolicySequenceMasking, or GRPO with `anchor: rollout`, whose"
    " clip is then around it"
)


def _where(layout: Layout, world_size: int) -> str:
    """Which ranks those are, where they are not all, and how many share their rows."""
    where = "" if len(layout.ranks) == world_size else f" of {rank_ranges(layout.ranks)}"
    return f"{where} ({layout.copies} share their rows)" if layout.copies > 1 else where
