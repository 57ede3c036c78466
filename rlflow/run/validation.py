"""Validation: by itself (`validate`), and as a part of training (`measure`)."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from typing import Any

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller import validation
from rlflow.loggers.console import Console
from rlflow.memory.out_of_memory import memory_watched, to_generate, to_score
from rlflow.models.causal_lm import CausalLM
from rlflow.module import handles, has_validation_step
from rlflow.process import startup
from rlflow.process.status import report
from rlflow.run.folder import from_here
from rlflow.run.policies import PolicyBuilder
from rlflow.run.prepared_run import Prepared
from rlflow.run.setup import Joined, join
from rlflow.run.trusted_code import trusted_code
from rlflow.run_state import RunState
from rlflow.values.layout import Layout


def validate(prepared: Prepared, callbacks: Callbacks, state: RunState, resolved_config: str | None) -> dict[str, Any]:
    """Validate the model of the config in a folder of its own; no optimizer is built. Called by all ranks.

    Args:
        prepared: The run, of `Settings.for_validation`.
        callbacks: Told of the validation.
        state: That they see.
        resolved_config: YAML; None for a run without a config.

    Returns:
        The metrics of one validation, and `problems`, the number of held-out prompts.
    """
    joined, module, loader = join(prepared, resolved_config), prepared.module, prepared.validation
    assert loader is not None
    with ExitStack() as stack:
        folder = joined.open_folder(stack.enter_context(joined.locked_folder()))
        log = folder.logs / f"rank{joined.transport.rank}.log"
        console = stack.enter_context(Console(log, prepared.steps, shows=joined.is_first))
        for line in trusted_code(prepared):
            console.say(line)
        if joined.context.conversations is not None:
            stack.callback(joined.context.conversations.close)
        scores = has_validation_step(module) or prepared.loss_node is not None
        for role in prepared.paths if scores else [prepared.lead]:
            if prepared.strategy.holds(role):
                handles(module)[role].freeze()
            joined.load(role)
        joined.set_up_engines()
        task = prepared.syncs().get(prepared.follows or "") if prepared.generates else None
        sync = None if task is None else PolicyBuilder(joined).sync(task)
        if sync is not None:
            sync.run(version=0)
        startup.end()
        metrics = measure(joined, version=0)
        state.metrics = dict(metrics)
        callbacks.call(Callback.on_validation_end, 0, metrics)
    joined.engines.close()
    results = {"problems": loader.size, **metrics}
    if joined.is_first:
        folder.validation.write_text(json.dumps(results, indent=2) + "\n")
        print(f"{handles(module)[prepared.lead].model} on {loader.size} held-out problems")
        for name, value in metrics.items():
            print(f"  {name:<22} {value:.4f}")
        config = "config.yaml, " if folder.config.exists() else ""
        print(f"left in {from_here(folder.path)}/: validation.json, {config}logs/")
    return results


def measure(joined: Joined, version: int) -> dict[str, float]:
    """Of the held-out rows: the scores of responses that policy `version` samples, and what the module measures."""
    report(joined.transport.rank, "validation")
    prepared, module, strategy = joined.prepared, joined.prepared.module, joined.prepared.strategy
    loader = prepared.validation
    assert loader is not None
    metrics = {}
    if prepared.scores_validation:
        policy = handles(module)[prepared.follows or ""]
        assert isinstance(policy, CausalLM)
        with memory_watched("validation, generating", partial(to_generate, strategy, joined.validating), strategy):
            metrics = validation.validate(
                module,
                joined.validating,
                loader,
                joined.transport,
                prepared.generating,
                samples=prepared.settings.val_samples,
                temperature=policy.temperature,
                seed=prepared.settings.seed,
                version=version,
                stop_token_ids=prepared.stop_token_ids,
                decode=prepared.decode,
                conversations=joined.context.conversations,
            )
    if has_validation_step(module) or prepared.loss_node is not None:
        lead = prepared.layouts[prepared.lead]
        layout = Layout(lead.ranks, lead.shards)
        with memory_watched("validation, scoring", partial(to_score, strategy), strategy):
            metrics |= validation.score_rows(
                module, prepared.loss_node, joined.context, loader, joined.transport, layout, strategy.root_device
            )
    return metrics
