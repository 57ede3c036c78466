"""`rlflow validate`: one validation, without training."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.run import Run
from rlflow.controller.validation import measure
from rlflow.controller.weight_sync import weight_sync
from rlflow.loggers.console import open_console
from rlflow.module import handles, has_validation_step
from rlflow.process import startup
from rlflow.run.folder import from_here
from rlflow.run.setup import join, load_role, locked_folder, open_folder, set_up_engines
from rlflow.run.tables import trusted_code


def validate(run: Run, callbacks: Callbacks, state: RunningTrainer, resolved_config: str | None) -> dict[str, Any]:
    """Validate the model of the config in a folder of its own; no optimizer is built. Called by all ranks.

    Args:
        run: The run, prepared with `Settings.for_validation`.
        callbacks: Callbacks that are called for the validation.
        state: The trainer as callbacks see it.
        resolved_config: Config as YAML; None for a run without a config.

    Returns:
        The metrics of one validation, and `problems`, the number of held-out prompts.
    """
    join(run, resolved_config)
    module, loader = run.module, run.validation
    assert loader is not None
    with ExitStack() as stack:
        folder = open_folder(run, stack.enter_context(locked_folder(run)))
        log = folder.logs / f"rank{run.transport.rank}.log"
        console = stack.enter_context(open_console(log, run.steps, shows=run.is_first))
        for line in trusted_code(run):
            console.say(line)
        if run.context.conversations is not None:
            stack.callback(run.context.conversations.close)
        scores = has_validation_step(module) or run.loss_node is not None
        for role in run.paths if scores else [run.lead]:
            if run.strategy.holds(role):
                handles(module)[role].freeze()
            load_role(run, role)
        set_up_engines(run)
        task = run.syncs().get(run.follows or "") if run.generates else None
        sync = None if task is None else weight_sync(run, task)
        if sync is not None:
            sync.run(version=0)
        startup.end()
        metrics = measure(run, version=0, done=0)
        state.callback_metrics = dict(metrics)
        callbacks.call(Callback.on_validation_end, 0, metrics)
    run.rank_engines.close()
    results = {"problems": loader.size, **metrics}
    if run.is_first:
        folder.validation.write_text(json.dumps(results, indent=2) + "\n")
        print(f"{handles(module)[run.lead].model} on {loader.size} held-out problems")
        for name, value in metrics.items():
            print(f"  {name:<22} {value:.4f}")
        config = "config.yaml, " if folder.config.exists() else ""
        print(f"left in {from_here(folder.path)}/: validation.json, {config}logs/")
    return results
