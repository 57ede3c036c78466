"""What a run says of its validations, on the terminal and in its summary."""

from __future__ import annotations

from typing import Any

from rlflow.run.folder import RunFolder, from_here


def by_summary_name(metrics: dict[str, float]) -> dict[str, float]:
    """Validation under the names of `summary.json`: `val/reward` is `reward`, `val_greedy/reward` `greedy_reward`."""
    return {name.removeprefix("val/").replace("val_greedy/", "greedy_"): value for name, value in metrics.items()}


def compared(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Validation before and after, under the names of `summary.json`."""
    ends = {"before": by_summary_name(before), "after": by_summary_name(after)}
    return {f"{name}_{end}": of[name] for name in ends["after"] for end, of in ends.items() if name in of}


def on_terminal(summarized: dict[str, float]) -> dict[str, float]:
    """What the terminal shows of a validation: not how long responses were, nor what else comes of scoring them."""
    of_scoring = ("reward", "length", "truncated", "errors")
    scored = {f"{greedy}{name}" for greedy in ("", "greedy_") for name in of_scoring}
    return {name: value for name, value in summarized.items() if name not in scored and not name.startswith("pass@")}


def closing_lines(folder: RunFolder, summary: dict[str, Any]) -> list[str]:
    """The last lines of a run on the terminal: validation before and after, steps, time, and where the results are."""
    before, after = (
        on_terminal({name.removesuffix(end): value for name, value in summary.items() if name.endswith(end)})
        for end in ("_before", "_after")
    )
    ends = {name: (before[name], after[name]) for name in after if name in before}
    greedy = ends.pop("greedy_accuracy", None)
    held_out = f"on {summary.get('problems')} held-out problems"
    lines = [f"{name} {held_out}: {start:.3f} before, {end:.3f} after" for name, (start, end) in ends.items()]
    if greedy is not None:
        lines[list(ends).index("accuracy")] += f" (greedy {greedy[0]:.3f}, {greedy[1]:.3f})"
    seconds = ", ".join(f"{stage} {time:.0f} s" for stage, time in summary["seconds"].items())
    config = "config.yaml, " if folder.config.exists() else ""
    adapter = (folder.model / "adapter_config.json").exists()
    form = "an adapter; `rlflow export` writes the whole model" if adapter else "Hugging Face form"
    return [
        *lines,
        f"steps {summary['steps']}; time {seconds}",
        f"left in {from_here(folder.path)}/: model/ ({form}), {config}summary.json, metrics.jsonl, metrics.csv,"
        f" samples.jsonl, curves.png, traces/ (`rlflow trace`), logs/",
    ]
