"""Lines on the terminal before the first step: numbers of prompts, samples and updates, memory, and warnings."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import torch

from rlflow.controller.run import Run
from rlflow.dag.tasks import rank_ranges
from rlflow.errors import SHOWN, UserError, readable_line, shortened
from rlflow.memory.estimate import memories, memory_lines
from rlflow.memory.workload import Workload, workload_of
from rlflow.models.sizes import size_of
from rlflow.module import environments, handles
from rlflow.run.schedules import updates_per_step
from rlflow.storage.space import in_bytes
from rlflow.values.batch import Batch
from rlflow.values.layout import Layout


def size_table(run: Run) -> list[str]:
    """The batch sizes that follow from the configuration, a line each."""
    module, data = run.module, run.data
    world_size, token_budget = run.settings.world_size, run.strategy.forward_plan.token_budget
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
    elif run.plan.dynamic_sampling is not None:
        lines.append(f"long responses are cut off: {prompts} prompts a draw until {prompts} groups have ended")
    dropped = run.train.scan.dropped
    if dropped:
        lines.append(f"dropped {dropped} overlong training rows")
    return lines + unclipped(run)


def unclipped(run: Run) -> list[str]:
    """A warning if the loss trains on samples of older weights and has no clip, cap or mask against that."""
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
    """The ranks of a layout as text, if they are not all ranks, and the number of ranks that share rows."""
    where = "" if len(layout.ranks) == world_size else f" of {rank_ranges(layout.ranks)}"
    return f"{where} ({layout.copies} share their rows)" if layout.copies > 1 else where


def memory_table(run: Run) -> Iterator[str]:
    """The memory of each role on a rank, a line each, and a warning if it is short.

    Args:
        run: The run; its strategy has joined the other ranks.
    """
    strategy, ranks_here = run.strategy, run.settings.ranks_here  # ranks that share a CPU's memory
    total, free = device_memory(strategy.root_device, ranks_here)
    try:
        workload = run_workload(run)
    except UserError as error:  # the config does not give this family's size; it runs nevertheless
        yield f"memory of a rank is not known before the run: {error}"
        return
    found = memories(workload, total)
    for memory in found:
        yield from memory_lines(memory, every=len(found) == 1)
        needed = max(memory.generating, memory.training)
        if not memory.fits:
            yield "warning: by these figures the run does not fit, and ends when the memory does; see the line above"
        elif needed > free:
            yield (
                f"warning: {in_bytes(needed)} are needed and {in_bytes(free)} of {in_bytes(total)} are free: end what"
                " else uses this memory"
            )


def run_workload(run: Run) -> Workload:
    """The work of a run in each step, for estimates of memory.

    Raises:
        UserError: The size of a model is not known from its config.
    """
    models, paths = handles(run.module), run.paths | run.policies
    return workload_of(
        run.module,
        run.data,
        run.graph,
        run.plan,
        run.layouts,
        {name: size_of(str(path), models[name].trust_remote_code) for name, path in paths.items()},
        run.strategy,
        run.engines.own if run.generates else {},
        ranks=run.strategy.world_size,
        on_cpu=run.strategy.root_device.type == "cpu",
        longest_response=run.train.scan.longest_response,
    )


def device_memory(device: torch.device, ranks_here: int) -> tuple[float, float]:
    """Bytes of a rank's device, and how many of them are free; on the CPU, an equal part of the machine's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total), float(free)
    memory = psutil.virtual_memory()
    return memory.total / ranks_here, memory.available / ranks_here


def first_prompt(run: Run) -> list[str]:
    """The first prompt that is drawn, with its special tokens, and the response to learn if there is one; one line.

    Of a run with an environment there is none: the environment begins the conversation, see `rlflow play`.
    """
    if environments(run.module):
        return []
    batch = run.train.first()
    prompt = batch.prompt_ids.rows()[0]
    learned = batch.response_ids[0, : batch.lengths[0]] if isinstance(batch, Batch) else batch.chosen_ids.rows()[0]
    shown = [shortened(readable_line(run.decode_with_special(ids.tolist())), SHOWN) for ids in (prompt, learned)]
    response = f", with the response '{shown[1]}'" if len(learned) else ""
    return [f"the first prompt, {len(prompt)} tokens: '{shown[0]}'{response}"]


def trusted_code(run: Run) -> list[str]:
    """A line for each model for which `trust_remote_code` is on, with the roles that use it."""
    found, roles = handles(run.module), run.policies | run.paths
    trusted: dict[str, list[str]] = {}
    for role in roles:
        if found[role].trust_remote_code:
            trusted.setdefault(found[role].model, []).append(f"`{role}`")
    return [
        f"`trust_remote_code` is on for {', '.join(names)}: the code stored with {model!r} is run"
        for model, names in trusted.items()
    ]
