"""`rlflow replay`: runs nodes of one step of an earlier run again in one process, on their stored inputs."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rlflow import checkpoint
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller import Controller
from rlflow.controller.inputs import NodeInputs, StoredInputs, difference, folder_of
from rlflow.controller.policies import Policies
from rlflow.controller.run import Run
from rlflow.dag.node import Node
from rlflow.data.loader import Prefetch
from rlflow.errors import UserError
from rlflow.loggers.jsonl import METRICS_FILE, read_metrics
from rlflow.loggers.trace import Trace
from rlflow.metrics import Metrics
from rlflow.run.folder import RunFolder
from rlflow.run.setup import join, load_roles, locked_folder, open_folder, set_up_engines


@dataclass(frozen=True)
class Replayed:
    """The result of a node that was run again; `str` of it is its line on the terminal.

        advantages: 256 rows, equal to the run's, to the bit
        actor_loss: 256 rows, at most 0.000125 from the run's; actor/loss 0.25 (run: 0.250125); ...

    Attributes:
        node: Name of the node.
        rows: Rows that it saw, on all ranks with stored rows.
        apart: Largest absolute difference from a number of the run; NaN if the run's numbers are not stored, infinite
            if shapes or integers differ.
        metrics: For a train node, its role's loss and gradient norm by name, each in this replay and in the run.
        raised: Whether the node raised in the run.
    """

    node: str
    rows: int
    apart: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    raised: bool = False

    def __str__(self) -> str:
        if self.raised:
            found = "it did not raise this time"
        elif math.isnan(self.apart):
            found = "what the run made was not stored"
        elif self.apart == 0:
            found = "equal to the run's, to the bit"
        else:
            found = f"at most {self.apart:.3g} from the run's"
        shown = "".join(f"; {name} {here:.9g} (run: {there:.9g})" for name, (here, there) in self.metrics.items())
        return f"{self.node}: {self.rows} rows, {found}{shown}"


def replay(
    run: Run, callbacks: Callbacks, run_dir: Path, step: int, node_id: str | None = None, debug: bool = False
) -> list[Replayed]:
    """Run nodes of a step again, in the order of the graph, and print a line for each; called by `Trainer.replay`.

    Weights are those of the newest undamaged checkpoint from before the step; for step 1, those with which the run
    began. Without such a checkpoint, nodes that need a model are left out.

    Args:
        run: The run as prepared for this one process.
        callbacks: Callbacks of the trainer.
        run_dir: Folder of the earlier run.
        step: Step of that run, from 1.
        node_id: Name of the node; None for all nodes with stored inputs.
        debug: Whether the debugger stops at the beginning of each node.

    Raises:
        UserError: Nothing is stored of that step or node, or it is damaged; or the node `node_id` needs a model and
            there are no weights.
    """
    from transformers.utils import logging

    stored = _stored(run, run_dir, step, node_id)
    nodes = [run.graph.nodes[each.node] for each in stored]
    needs = any(_needs_weights(node) for node in nodes)
    found, folder, lines = _weights(run_dir, step) if needs else (False, None, [])
    if not found and node_id is not None and _needs_weights(run.graph.nodes[node_id]):
        raise UserError(
            f"`--node` is {node_id!r}, which needs a model: {'; '.join(lines)}; bring a checkpoint back, or"
            " give a node without one"
        )
    for line in lines:
        print(line)
    logged = _logged(run_dir, step) if any(node.kind == "train" for node in nodes) else {}
    run.replays = True
    join(run, None)
    with ExitStack() as stack:
        if run.context.conversations is not None:
            stack.callback(run.context.conversations.close)
        if found:
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            load_roles(run)
            if folder is not None:
                checkpoint.restore(folder, run.strategy, run.stateful)
            if any(node.generates for node in nodes):
                set_up_engines(run)
                stack.callback(run.rank_engines.close)
        metrics = Metrics()
        controller = _controller(run, callbacks, metrics, stack)
        results = []
        for each, node in zip(stored, nodes, strict=True):
            if _needs_weights(node) and not found:
                print(f"{node.id}: left out, for want of weights")
                continue
            again = _run(run, controller, metrics, each, step - 1, debug, logged)
            results.append(replace(again, raised=bool(each.failed)))
            print(results[-1])
    return results


def _weights(run_dir: Path, step: int) -> tuple[bool, Path | None, list[str]]:
    """Three values: whether there are weights; their checkpoint, or None for the run's first models; lines to print."""
    done = step - 1
    if done == 0:
        return True, None, ["weights: the models that the run began with"]
    passed: list[str] = []
    for folder in checkpoint.newest_first(run_dir):
        at = int(folder.name.removeprefix("step-"))
        if at > done:
            continue
        if (what := checkpoint.damage(folder)) is not None:
            passed.append(f"{folder} has {what}, so it is passed over")
            continue
        earlier = f", {done - at} steps before this one began: numbers that need a model will differ"
        return True, folder, [*passed, f"weights: {folder}{earlier if at < done else ''}"]
    none = f"{run_dir} has no{' other' if passed else ''} checkpoint after {done} steps or fewer"
    return False, None, [*passed, none]


def _needs_weights(node: Node) -> bool:
    return bool(node.role or node.uses or node.generates)


def _stored(run: Run, run_dir: Path, step: int, node_id: str | None) -> list[StoredInputs]:
    """The stored inputs of nodes to run, in the graph's order: all, or `node_id` and before it nodes that train it."""
    folder = folder_of(RunFolder(run_dir).inputs, step - 1)
    kept = [node for node in run.graph.order if (folder / f"{node.id}.json").is_file()]
    names = [node.id for node in kept]
    again = f"run again with `trainer.dump_steps: [{step}]`"
    if not kept:
        raise UserError(f"{run_dir} has no inputs of step {step}; {again}, or give a step in which a node raised")
    if node_id is not None and node_id not in names:
        raise UserError(
            f"`--node` is {node_id!r}, and of step {step} {run_dir} has inputs of {', '.join(names)}; give"
            f" one of these, or {again}"
        )
    if node_id is not None:
        wanted = run.graph.nodes[node_id]
        used = {wanted.role, *wanted.uses, *wanted.generates}
        used |= {owner for average, owner in run.graph.averages.items() if average in used}
        before = kept[: names.index(node_id)]
        kept = [*(node for node in before if node.kind == "train" and node.role in used), wanted]
    found = [StoredInputs.read(folder, node.id) for node in kept]
    for each in found:
        for rank, what in each.failed.items():
            print(f"{each.node} raised on rank {rank}: {what}")
        if each.there != each.ranks:
            ranks = ", ".join(map(str, each.there))
            print(f"{each.node}: only the rows of rank {ranks} were stored, and {len(each.ranks)} ranks ran it")
    return found


def _controller(run: Run, callbacks: Callbacks, metrics: Metrics, stack: ExitStack) -> Controller:
    trace = Trace(open_folder(run, stack.enter_context(locked_folder(run))).traces, run.rank)
    stack.callback(trace.close)
    prompts = stack.enter_context(Prefetch(run.train, None))
    return Controller(run, Policies(run, callbacks), prompts, metrics, trace, callbacks, NodeInputs(run, None))


def _run(
    run: Run,
    controller: Controller,
    metrics: Metrics,
    stored: StoredInputs,
    step: int,
    debug: bool,
    logged: dict[str, float],
) -> Replayed:
    """Run a node of a step, counted from 0."""
    node = run.graph.nodes[stored.node]
    run.module.load_state_dict(stored.state())
    if debug:
        import pdb  # imported here: it fails where the user has a script named like one of its modules, as `code.py`

        setattr(run.module, node.id, partial(pdb.Pdb().runcall, getattr(run.module, node.id)))
    now = controller.replay(node.id, step, stored.draw, lambda layout, now: stored.put(run, layout, now))
    rows = len(now.spaces[node.inside])
    if node.kind == "train":
        here, there = metrics.reduce(step, run.transport, 0.0), logged
        names = (f"{node.role}/loss", f"{node.role}/grad_norm")
        both = {name: (here[name], there[name]) for name in names if name in here and name in there}
        return Replayed(node.id, rows, max((_apart(a, b) for a, b in both.values()), default=math.nan), both)
    layout = run.value_layouts[node.id]
    made = stored.made(run, layout, step)
    if made is None:
        return Replayed(node.id, rows, math.nan)
    value, space = made
    if len(space) != len(now.buffer.space(node.id)):
        return Replayed(node.id, rows, math.inf)
    return Replayed(node.id, rows, difference(now.buffer.get(node.id, layout), value, node.returns, space.lengths))


def _logged(run_dir: Path, step: int) -> dict[str, float]:
    """The metrics that the run logged of the step, by name; NaN for null, empty if they are missing."""
    lines = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    of_step = [line for line in lines if line["step"] == step]
    return {name: math.nan if value is None else value for line in of_step for name, value in line.items()}


def _apart(here: float, there: float) -> float:
    """The absolute difference; infinite if a number is not finite, since the run's log has no value for it then."""
    return abs(here - there) if math.isfinite(here) and math.isfinite(there) else math.inf
