"""Passes the metrics and samples of a run to its loggers and to the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from rlflow.controller.run import Run
from rlflow.dag.drawing import mermaid, text
from rlflow.errors import readable_line, shortened
from rlflow.loggers.console import Console
from rlflow.loggers.csv import CSVLogger
from rlflow.loggers.jsonl import JSONLLogger
from rlflow.loggers.lightning import LightningLogger, LoggerLike
from rlflow.loggers.logger import Logger
from rlflow.process import startup
from rlflow.run.code_state import code_of, note_start
from rlflow.run.folder import RunFolder, from_here
from rlflow.run.resume import Resume
from rlflow.run.setup import plain_hparams

LETTERS = 200  # shown of a sample's prompt, and of its response


class Recording:
    """A context that starts the loggers, passes metrics and samples to them, and finalizes them, also after an error.

    Args:
        run: The run on this rank; only the loggers of rank 0 are called.
        folder: Folder of the run.
        console: Shows the steps on the terminal.
        loggers: Loggers in addition to the run's own files.
        resume: The checkpoint from which the run resumes, if any.

    Attributes:
        console: The terminal.
        before: Metrics of the validation before the first step of the run, also if it was resumed since.
    """

    def __init__(
        self, run: Run, folder: RunFolder, console: Console, loggers: Sequence[LoggerLike], resume: Resume
    ) -> None:
        records = run.is_first and not run.settings.fast_dev_run
        self._own: list[JSONLLogger | CSVLogger] = [JSONLLogger(), CSVLogger()] if records else []
        others = [each if isinstance(each, Logger) else LightningLogger(each) for each in loggers]
        for place, each in enumerate(others):
            if isinstance(each, LightningLogger):
                each.place, each.pictures, each.say = place, run.train.pictures, console.say
        given = [each for each in others if type(each) not in (JSONLLogger, CSVLogger)]  # the run has its own
        self._loggers: list[Logger] = [*self._own, *given] if records else []
        self._run = run
        self._folder = folder
        self.console = console
        self._done_before = resume.done
        self._first_step = 0 if resume.checkpoint is None else resume.done + 1
        self._goes_on = resume.goes_on
        self._started: list[Logger] = []
        self._code: dict[str, Any] = {}
        self._graph = ""
        self.before: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._loggers:
            self._code = code_of(self._run.module)
            self._graph = text(self._run.graph, self._run.plan, rank=0).encode(errors="replace").decode()  # of any path
        try:
            self._start([each for each in self._loggers if not (self._goes_on and each in self._own)])
        except BaseException:
            self._finalize("failed")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finalize("success" if error is None else "failed")

    def start_rest(self) -> None:
        """Start the run's own loggers, which drop records of later steps, after a resume has been checked."""
        self._start([each for each in self._loggers if each not in self._started])
        if self._loggers:
            note_start(self._code, self._folder.code)
            drawing = mermaid(self._run.graph, self._run.plan)
            self._folder.graph.write_text(f"```mermaid\n{drawing}```\n\n```\n{self._graph}\n```\n", encoding="utf-8")

    def begin(self, validation: dict[str, float]) -> None:
        """Record the validation before the first step, if there was one; called by all ranks."""
        self._write(validation, self._done_before)
        if validation:
            self.before = validation
            shown = on_terminal(by_summary_name(validation)).items()
            values = (f"{'greedy' if name == 'greedy_accuracy' else name} {value:.3f}" for name, value in shown)
            self.console.say(f"before training: {', '.join(values)}")
        self.console.say(startup.line(startup.end()))
        self.console.begin()

    def step(self, done: int, metrics: dict[str, float], records: bool) -> None:
        """Show a step on the terminal, and pass its metrics to loggers if `records`; called by all ranks.

        Samples are passed if `log_samples_every_n_steps` says so, or as the metrics if it is None.
        """
        samples = self._write(metrics, done, records)
        if done == self._done_before + 1 and samples:
            self.console.say(scored_sample(samples[0]))
        self.console.step(done, metrics, self._run.context.on_bar)

    def state_dict(self) -> dict[str, float]:
        """Metrics of the validation before the first step."""
        return self.before

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.before = state

    def _start(self, loggers: Iterable[Logger]) -> None:
        for logger in loggers:
            logger.start(self._folder.path, first_step=self._first_step)
            self._started.append(logger)
            module = self._run.module
            config = self._run.config or (plain_hparams(module) if module.logs_hparams else {})
            logger.log_config({**self._code, **config})
            logger.log_graph(self._graph)

    def _finalize(self, status: str) -> None:
        with ExitStack() as stack:
            for logger in self._started:
                stack.callback(logger.finalize, status)

    def _write(self, metrics: dict[str, float], done: int, records: bool = True) -> list[dict[str, Any]]:
        """Pass metrics and the step's samples to the loggers; on rank 0 the samples are returned."""
        samples, every = self._run.samples.take(done - 1), self._run.settings.log_samples_every_n_steps
        recorded = {name: x for name, x in metrics.items() if records and name not in self._run.context.off_loggers}
        shown = samples if (records if every is None else done % every == 0) else []
        for logger in self._loggers:
            if recorded:
                logger.log_metrics(recorded, done)
            if shown:
                logger.log_samples(shown, done)
        self._warn()
        return samples

    def _warn(self) -> None:
        """Show warnings about damage of the run's own files."""
        for logger in self._own:
            while logger.warnings:
                self.console.say(logger.warnings.pop(0))


def scored_sample(sample: Mapping[str, Any]) -> str:
    """One line with a sample of a step and its scores, so that a wrong reward is noticed at the beginning."""
    prompt, response = (shortened(readable_line(sample[name]), LETTERS) for name in ("prompt", "response"))
    parts = "".join(f", {name} {part:g}" for name, part in sample["parts"].items() if part is not None)
    return f"a sample: '{response}' to '{prompt}' has the reward {sample['reward']:g}{parts}"


def by_summary_name(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of a validation by their names in `summary.json`, such as `reward` for `val/reward`."""
    return {name.removeprefix("val/").replace("val_greedy/", "greedy_"): value for name, value in metrics.items()}


def compared(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Metrics of the validations before and after, by their names in `summary.json`."""
    ends = {"before": by_summary_name(before), "after": by_summary_name(after)}
    return {f"{name}_{end}": of[name] for name in ends["after"] for end, of in ends.items() if name in of}


def on_terminal(summarized: dict[str, float]) -> dict[str, float]:
    """The metrics of a validation that the terminal shows, without those that come with every scoring."""
    of_scoring = ("reward", "length", "truncated", "errors")
    scored = {f"{greedy}{name}" for greedy in ("", "greedy_") for name in of_scoring}
    found = {}
    for name, value in summarized.items():
        dataset, _, last = name.rpartition("/")  # of `math/accuracy`, of the dataset `math` in a mixture
        if last not in scored and not last.startswith("pass@") and not dataset.startswith("greedy_"):
            found[name] = value
    return found


def closing_lines(folder: RunFolder, summary: dict[str, Any]) -> list[str]:
    """The last lines of a run on the terminal: validation before and after, steps, time, and where the results are."""
    before, after = (
        on_terminal({name.removesuffix(end): value for name, value in summary.items() if name.endswith(end)})
        for end in ("_before", "_after")
    )
    ends = {name: (before[name], after[name]) for name in after if name in before}
    greedy = ends.pop("greedy_accuracy", None)
    held_out = f" on {summary.get('problems')} held-out problems"
    lines = [
        f"{name}{held_out * ('/' not in name)}: {start:.3f} before, {end:.3f} after"
        for name, (start, end) in ends.items()
    ]
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
