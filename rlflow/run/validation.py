"""`rlflow validate` and `rlflow test`: measure a model on held-out rows, without training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.run import Run
from rlflow.controller.validation import measure, powers_of_two, score_responses
from rlflow.controller.weight_sync import weight_sync
from rlflow.errors import UserError
from rlflow.functional import bootstrap_interval, pass_at_k
from rlflow.loggers.console import open_console
from rlflow.module import environments, handles, has_validation_step
from rlflow.process import startup
from rlflow.rewards.reward import BEST_REWARD
from rlflow.run.folder import RunFolder, from_here
from rlflow.run.setup import join, load_role, locked_folder, open_folder, set_up_engines
from rlflow.run.tables import trusted_code
from rlflow.values.rollout import Rollout


def validate(run: Run, callbacks: Callbacks, state: RunningTrainer, resolved_config: str | None) -> dict[str, Any]:
    """Validate the model of the config in a folder of its own; no optimizer is built. Called by all ranks.

    Args:
        run: The run, prepared with `Settings.for_command`.
        callbacks: Callbacks that are called for the validation.
        state: The trainer as callbacks see it.
        resolved_config: Config as YAML; None for a run without a config.

    Returns:
        The metrics of one validation, and `problems`, the number of held-out prompts.
    """
    assert run.validation is not None
    join(run, resolved_config)
    with loaded(run) as folder:
        metrics = measure(run, version=0)
        state.callback_metrics = dict(metrics)
        callbacks.call(Callback.on_validation_end, 0, metrics)
    run.rank_engines.close()
    results = {"problems": run.validation.size, **metrics}
    if run.is_first:
        folder.validation.write_text(json.dumps(results, indent=2) + "\n")
        print(f"{handles(run.module)[run.lead].model} on {run.validation.size} held-out problems")
        for name, value in metrics.items():
            print(f"  {name:<22} {value:.4f}")
        config = "config.yaml, " if folder.config.exists() else ""
        print(f"left in {from_here(folder.path)}/: validation.json, {config}logs/")
    return results


def test(run: Run, callbacks: Callbacks, state: RunningTrainer, resolved_config: str | None) -> dict[str, Any]:
    """Score `trainer.val_samples` responses to each held-out prompt, and one at temperature 0; called by all ranks.

    `test.json` has the results, and `responses.jsonl` every response with its score.

    Args:
        run: The run, as for `validate`.
        callbacks: None is called; these are not all metrics of a validation.
        state: The trainer's state, as for `validate`.
        resolved_config: Config as YAML, as for `validate`.

    Returns:
        `problems`; and by name, under `<dataset>/` too where there are several, a mapping of `mean`, and `low` and
        `high` of its 95 % interval: `avg@<n>`, the share of right responses; `pass@<k>`; `reward`; and `greedy`, the
        share of right responses at temperature 0.
    """
    loader = run.validation
    assert loader is not None
    if found := list(environments(run.module)):
        raise UserError(f"`module.{found[0]}` is an environment, and `test` scores single responses; use `validate`")
    if not run.scores_validation:
        raise UserError(f"{type(run.module).__name__} has no reward to score responses with; set `module.reward`")
    join(run, resolved_config)
    mine: list[dict[str, Any]] = []

    def keep(prefix: str, ids: Tensor, rollout: Rollout, scores: Tensor) -> None:
        n, rows = len(scores) // max(1, len(ids)), loader.rows_of_all(ids).tolist()
        names = {name: of_it.tolist() for name, of_it in loader.masks(rollout.rows).items()}
        for i, score in enumerate(scores.tolist()):
            found = {"row": rows[i // n], "sample": i % n, "greedy": prefix != "val", "reward": score}
            dataset = next((name for name, of_it in names.items() if of_it[i]), "")
            mine.append({**found, "dataset": dataset, "response": rollout.texts[i]})

    with loaded(run) as folder:
        state.callback_metrics = dict(score_responses(run, version=0, on_scored=keep))
        responses = [each for of_rank in run.transport.gather_json(mine) for each in of_rank]
    run.rank_engines.close()
    responses.sort(key=lambda each: (each["row"], each["greedy"], each["sample"]))
    results = {"problems": loader.size, **intervals(responses)}
    if run.is_first:
        (folder.path / "test.json").write_text(json.dumps(results, indent=2) + "\n")
        with (folder.path / "responses.jsonl").open("w") as file:
            file.writelines(json.dumps(each) + "\n" for each in responses)
        print(f"{handles(run.module)[run.lead].model} on {loader.size} problems, with 95 % intervals")
        for name, each in results.items():
            if isinstance(each, Mapping):
                print(f"  {name:<22} {each['mean']:.4f}  [{each['low']:.4f}, {each['high']:.4f}]")
        print(f"left in {from_here(folder.path)}/: test.json, responses.jsonl, logs/")
    return results


def intervals(responses: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over prompts with their intervals, by name, from all scored responses; see `test`."""
    found: dict[str, Tensor] = {}
    datasets = sorted({each["dataset"] for each in responses} - {""})
    for dataset in ("", *datasets):
        prefix = f"{dataset}/" if dataset else ""
        of = [each for each in responses if dataset in ("", each["dataset"])]
        problems = len({each["row"] for each in of})
        sampled, greedy = (
            torch.tensor([each["reward"] for each in of if each["greedy"] == at], dtype=torch.float64).view(
                problems, -1
            )
            for at in (False, True)
        )
        n, right = sampled.shape[1], (sampled >= BEST_REWARD).double()
        found[f"{prefix}avg@{n}"] = right.mean(dim=1)
        for k in powers_of_two(n)[1:]:
            found[f"{prefix}pass@{k}"] = pass_at_k(right.sum(dim=1), n, k)
        found[f"{prefix}reward"] = sampled.mean(dim=1)
        found[f"{prefix}greedy"] = (greedy >= BEST_REWARD).double().mean(dim=1)
    of_ends = {name: bootstrap_interval(values) for name, values in found.items()}
    return {
        name: {"mean": float(values.mean()), "low": of_ends[name][0], "high": of_ends[name][1]}
        for name, values in found.items()
    }


@contextmanager
def loaded(run: Run, resumes: bool = False) -> Iterator[RunFolder]:
    """A context with the run's folder, in which models and engines are loaded and hold the same weights.

    Args:
        run: The run, which the ranks have joined.
        resumes: Whether files in the folder stay.
    """
    module = run.module
    with ExitStack() as stack:
        folder = open_folder(run, stack.enter_context(locked_folder(run)), resumes)
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
        yield folder
