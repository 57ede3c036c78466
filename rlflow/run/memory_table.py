"""What a run takes of its devices' memory, printed before its first step."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import torch

from rlflow.controller.run import Run
from rlflow.dag.node import engine_of
from rlflow.errors import UserError
from rlflow.memory.estimate import memories, memory_lines, require_room_for_engines
from rlflow.memory.workload import Lengths, Workload, engine_here, loaded_role
from rlflow.models.sizes import size_of
from rlflow.module import handles
from rlflow.storage.space import in_bytes


def memory_table(run: Run) -> Iterator[str]:
    """The memory of each role on a rank, a line each, and a warning where it is short.

    Args:
        run: The run; its strategy has joined the other ranks.

    Raises:
        UserError: Several engines alone take more than the memory of a rank.
    """
    strategy, ranks_here = run.strategy, run.settings.devices  # which on the CPU share its memory
    total, free = device_memory(strategy.root_device, ranks_here)
    try:
        workload = run_workload(run)
    except UserError as error:  # of a family whose size is not known from its config; it runs nevertheless
        yield f"memory of a rank is not known before the run: {error}"
        return
    found = memories(workload, total)
    for memory in found:
        require_room_for_engines(memory)
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
    """What a run has to do at each step.

    Raises:
        UserError: The size of a model is not known from its config.
    """
    module, data, strategy = run.module, run.data, run.strategy
    graph, layouts, models = run.graph, run.layouts, handles(module)
    on_cpu = strategy.root_device.type == "cpu"
    rows = data.prompts_per_step * module.group_size
    sizes = {
        name: size_of(str(path), models[name].trust_remote_code) for name, path in (run.paths | run.policies).items()
    }
    roles = {role: loaded_role(role, models, sizes[role], strategy, layouts[role], rows, on_cpu) for role in run.paths}
    policies = {
        name: loaded_role(name, models, sizes[name], strategy, layouts[name], rows, on_cpu)
        for name in run.policies
        if name not in roles
    }
    sampled = any(node.kind == "rollout" for node in graph.order)
    longest = (None if sampled else data.max_response_length) or module.max_response_length
    lengths = Lengths(data.max_prompt_length / 2, longest / 2, data.max_prompt_length, longest)
    follows = run.follows if run.generates else None
    return Workload(
        graph=graph,
        plan=run.plan,
        ranks=strategy.world_size,
        roles=roles,
        follows=follows,
        engines={
            policy: engine_here(engine, layouts[engine_of(policy)], (roles | policies)[policy], lengths, rows, on_cpu)
            for policy, engine in run.engines.own.items()
            if run.generates
        },
        prompts=data.prompts_per_step,
        group_size=module.group_size,
        lengths=lengths,
        moves_rows=False,
        policies=policies,
        together=tuple(frozenset(node.generates) for node in graph.order if len(node.generates) > 1),
    )


def device_memory(device: torch.device, ranks_here: int) -> tuple[float, float]:
    """Bytes of a rank's device, and how many of them are free; on the CPU an equal part of the machine's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total), float(free)
    memory = psutil.virtual_memory()
    return memory.total / ranks_here, memory.available / ranks_here
