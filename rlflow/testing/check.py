"""`check`: tests that an algorithm's gradient does not depend on micro-batches and the like, and fits its loss."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError, did_you_mean
from rlflow.module import RLModule, environments, handles
from rlflow.testing.derivative import LIMIT
from rlflow.testing.ranks import RankFailure, Ranks, message_of
from rlflow.testing.recorded import PROMPTS, recorded_rows
from rlflow.testing.recorded_step import SMALL, Outcome, Rows, Way, Wrong, run_step, small

FLOAT64, FLOAT32 = 1e-8, 1e-5  # norm of a difference over the norm
SEEN64, SEEN32 = 1e-7, 1e-3  # a node's value that differs by more, over the largest of the node, is named


@dataclass(frozen=True)
class CheckColumn:
    """A change to a step that should not change the gradient.

    Attributes:
        name: Name of the column in the table and in `depends_on`.
        what: Description of the change.
        way: Way in which the step is run then.
    """

    name: str
    what: str
    way: Way

    @property
    def limit(self) -> float:
        """The largest difference that counts as rounding."""
        return FLOAT64 if self.way.strategy == "plain" else FLOAT32


PLAIN = Way(derives=True)
COLUMNS = (
    CheckColumn("randomness", "the step once more, with other states of the random generators", Way(disturbed=True)),
    CheckColumn("micro-batches", "one or two rows at a time", Way(token_budget=SMALL)),
    CheckColumn("packing", "rows one behind the other, without padding", Way(packing=True)),
    CheckColumn("prefixes", "rows that begin alike share their first tokens", Way(packing=True, share_prefixes=True)),
    CheckColumn("order", "the responses of each prompt in the opposite order", Way(backwards="responses")),
    CheckColumn("order of groups", "the prompts in the opposite order", Way(backwards="prompts")),
    CheckColumn("padding", "more padding, with other numbers in it", Way(spoilt="padding")),
    CheckColumn("masked", "other numbers at tokens that a tool wrote", Way(spoilt="masked")),
    CheckColumn("ranks", "2 ranks", Way(ranks=2)),
    CheckColumn("zero2", "2 ranks, DeepSpeed's ZeRO-2 in float32", Way("zero2", 2, packing=True, token_budget=SMALL)),
    CheckColumn("fsdp2", "2 ranks, torch's FSDP2 in float32", Way("fsdp2", 2, packing=True, token_budget=SMALL)),
)
NAMES = ("derivative", *(column.name for column in COLUMNS))


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: Name of the column.
        apart: Norm of the difference of the gradients, over the norm of the gradient; None where it could not run.
        node: The first node whose value differs; None where the gradient does not differ.
        what: Description of the difference there.
        meant: Whether the algorithm is said to depend on it.
        left_out: Reason why it was not run; empty where it was.
    """

    name: str
    apart: float | None
    node: str | None = None
    what: str = ""
    meant: bool = False
    left_out: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether something differs that should not."""
        return self.node is not None and not self.meant

    def __str__(self) -> str:
        shown = "-" if self.apart is None else f"{self.apart:.1e}"
        if self.left_out:
            return f"{self.name:16}{shown:>10}  left out: {self.left_out}"
        if self.node is None:
            return f"{self.name:16}{shown:>10}  same"
        label = "meant: " if self.meant else "DIFFERS: "
        return f"{self.name:16}{shown:>10}  {label}`{self.node}` {self.what}"


@dataclass(frozen=True)
class Report:
    """The findings of `check`; `str` of it is a table.

    Attributes:
        head: Line that says what was run.
        lines: Lines of the table, one for each column.
    """

    head: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def wrong(self) -> tuple[Line, ...]:
        """The lines of columns that change the gradient and should not."""
        return tuple(line for line in self.lines if line.is_wrong)

    def __str__(self) -> str:
        end = f"{len(self.wrong)} of {len(self.lines)} differ" if self.wrong else "all as it should be"
        return "\n".join([self.head, *self.notes, *map(str, self.lines), end])


def check(
    module: RLModule,
    depends_on: Collection[str] = (),
    row: Mapping[str, Any] | None = None,
    parts: Sequence[str] = (),
    images: bool = False,
) -> Report:
    """Check an algorithm in a test: `rlflow.testing.check(MyAlgorithm("tiny", reward=exact))`.

    One step is run on a small seeded model and recorded rows, in float64. Then it is run again for each column: with
    other micro-batches, another order, two ranks and so on. The gradient must be the same each time, and it must be the
    derivative of the loss. Models of the module are replaced by small ones, and its reward by recorded rewards. Two
    processes are forked.

    Args:
        module: The algorithm, which is not changed.
        depends_on: Names of columns on which the gradient is meant to depend, in addition to those of the class's
            `depends_on`.
        row: A row of the dataset, for nodes that read its columns.
        parts: Names of the reward's parts, if nodes read parts and the names do not follow from the reward.
        images: Whether prompts have images.

    Returns:
        The report, if nothing is wrong.

    Raises:
        AssertionError: The gradient depends on another column; the message is the table.
        UserError: The step cannot run.
    """
    report = examine(module, depends_on, row, parts, images)
    assert not report.wrong, f"\n{report}"
    return report


def examine(
    module: RLModule,
    depends_on: Collection[str] = (),
    row: Mapping[str, Any] | None = None,
    parts: Sequence[str] = (),
    images: bool = False,
    columns: Sequence[CheckColumn] = COLUMNS,
) -> Report:
    """Like `check`, with faults in the report instead of an exception."""
    meant = {*depends_on, *type(module).depends_on}
    for name in meant:
        if name not in NAMES:
            raise UserError(f"`depends_on` names {name!r}.{did_you_mean(name, NAMES)} The lines are {', '.join(NAMES)}")
    rows = recorded_rows(row or {}, images)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="rlflow-check-") as scratch, _quiet():
            one = small(module, Path(scratch) / "models", tuple(parts), images)
            notes = _notes(module, one, images)
            lines = tuple(_lines(one, rows, Path(scratch), meant, columns))
    finally:
        torch.set_num_threads(threads)
    head = f"{type(module).__name__}: one step on {len(PROMPTS)} recorded prompts"
    return Report(head, lines, notes)


def _lines(
    module: RLModule, rows: list[dict[str, Any]], scratch: Path, meant: Collection[str], columns: Sequence[CheckColumn]
) -> Iterator[Line]:
    def run(way: Way) -> Outcome:
        return run_step(module, rows, way, Path(tempfile.mkdtemp(dir=scratch)))

    alone = [column for column in columns if column.way.ranks == 1]
    absent = {"zero2": "DeepSpeed is not installed"} if find_spec("deepspeed") is None else {}
    shared = [column for column in columns if column.way.ranks > 1 and column.name not in absent]
    ranks = Ranks(2, run, [column.way for column in shared], scratch)
    try:
        try:
            plain = run(PLAIN)
        except Wrong as wrong:
            yield Line("derivative", None, wrong.node, str(wrong))
            return
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the step cannot run: `{getattr(error, 'node', 'step')}` {message_of(error)}; correct it"
            ) from error
        if not plain.gradients:
            raise UserError(
                "no role was trained in the step: no recorded row has a token to learn from; look at what the"
                " train node reads"
            )
        yield _derived(plain, meant)
        for column in alone:
            try:
                yield _compared(column, plain, run(column.way), meant)
            except Exception as error:
                yield _raised(column, error, meant)
        for column, found in zip(shared, ranks.results(), strict=True):
            if isinstance(found, RankFailure):
                yield _raised(column, found, meant)
            else:
                yield _compared(column, plain, Outcome.joined(found), meant)
        for name, why in absent.items():
            yield Line(name, None, left_out=why)
    finally:
        ranks.close()


def _derived(plain: Outcome, meant: Collection[str]) -> Line:
    """The line of the derivative, or of a gradient that is 0 or not finite."""
    for role, updates in plain.gradients.items():
        if not all(tensor.isfinite().all() for update in updates for tensor in update.values()):
            return Line("derivative", None, plain.trained_by[role], f"gives `{role}` an infinite or NaN gradient")
        if all(not tensor.any() for update in updates for tensor in update.values()):
            return Line("derivative", None, plain.trained_by[role], f"gives `{role}` a gradient of 0 in every weight")
    largest = max(plain.derivatives.values(), default=0.0)
    node = next((node for node, apart in plain.derivatives.items() if not apart <= LIMIT), None)
    what = "has another gradient than the derivative of its loss"
    return Line("derivative", largest, node, what if node else "", "derivative" in meant)


def _compared(column: CheckColumn, plain: Outcome, other: Outcome, meant: Collection[str]) -> Line:
    apart = _gradients_apart(plain, other)
    if apart <= column.limit:
        return Line(column.name, apart)
    node, what = _first(plain, other, SEEN64 if column.way.strategy == "plain" else SEEN32)
    return Line(column.name, apart, node, what, column.name in meant)


def _raised(column: CheckColumn, error: Exception, meant: Collection[str]) -> Line:
    what = str(error) if isinstance(error, RankFailure | Wrong) else message_of(error)
    if "fork-based multiprocessing" in what:  # torch's words where threads of a GPU's backward passes are running
        return Line(column.name, None, left_out="this process has used a GPU, and cannot be forked; check in a new one")
    return Line(column.name, None, getattr(error, "node", None) or "step", what, column.name in meant)


def _gradients_apart(plain: Outcome, other: Outcome) -> float:
    """The largest norm of a difference of a role's gradients, over the norm; infinite if there are others."""
    if plain.gradients.keys() != other.gradients.keys():
        return float("inf")
    largest = 0.0
    for role, updates in plain.gradients.items():
        if len(updates) != len(other.gradients[role]):
            return float("inf")
        norm = max(sum(float(each.square().sum()) for each in update.values()) for update in updates) ** 0.5
        for one, two in zip(updates, other.gradients[role], strict=True):
            apart = sum(float((one[key] - two[key]).square().sum()) for key in one) ** 0.5
            largest = max(largest, apart / norm if norm else apart)
            if apart != apart:
                return float("inf")
    return largest


def _first(plain: Outcome, other: Outcome, seen: float) -> tuple[str, str]:
    """The first node whose value differs, and how."""
    for node in plain.order:
        pairs = []
        if node in plain.values:
            pairs = [(plain.rows(node), other.rows(node) if node in other.values else {})]
        elif node in plain.losses:
            pairs = list(zip(plain.losses[node], other.losses.get(node, []), strict=False))
        for one, two in pairs:
            if (what := _rows_apart(one, two, seen)) is not None:
                return node, what
    node = next(iter(plain.losses))
    for role, name in plain.trained_by.items():
        single = Outcome(gradients={role: plain.gradients[role]}), Outcome(gradients={role: other.gradients[role]})
        if _gradients_apart(*single) > seen:
            node = name
            break
    return node, "has the same losses and another gradient"


def _rows_apart(one: Rows, two: Mapping[Any, list[dict[str, Any]]], seen: float) -> str | None:
    """The largest difference in a node's rows; None if nothing differs."""
    if one.keys() != two.keys():
        return "made other rows"
    pairs = [
        (key, name, mine[name], theirs[name])
        for key in one
        for mine, theirs in zip(_sorted(one[key]), _sorted(two[key]), strict=False)
        for name in mine
    ]
    largest = max((float(a.abs().max()) for _, _, a, _ in pairs if _is_float(a)), default=0.0) or 1.0
    most, found = seen, None
    for key, name, a, b in pairs:
        if not isinstance(a, Tensor):
            continue
        if a.shape != b.shape:
            return f"{_row(key)} has {list(b.shape)} numbers and not {list(a.shape)}"
        if not a.numel():
            continue
        off = (a.double() - b.double()).abs()
        apart = float(off.max()) / (largest if _is_float(a) else 1.0)
        if apart > most or apart != apart:
            place = int(off.flatten().argmax())
            part = f" `{name}`" if name else ""
            at = f", token {place}" if a.dim() else ""
            most = apart
            found = (
                f"gives {_row(key)}{part}{at} {float(b.flatten()[place]):.4g} and not {float(a.flatten()[place]):.4g}"
            )
    return found


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the same tokens, ordered by their numbers."""
    return sorted(rows, key=lambda row: [float(x.double().sum()) for x in row.values() if isinstance(x, Tensor)])


def _row(key: tuple[Any, ...]) -> str:
    """A row as its text: `abc`, or `abc -> 012` for a response."""
    if all(isinstance(part, tuple) for part in key):
        return " -> ".join(repr("".join(chr(each) for each in part if each)) for part in key)
    return f"prompt {PROMPTS[key[0]]!r}" if len(key) == 1 else f"row {key[-1]}"


def _notes(given: RLModule, module: RLModule, images: bool) -> tuple[str, ...]:
    """Notes on what replaces the user's models and reward."""
    notes = []
    models = handles(given) | dict(given.config_models)
    if large := {f"`{role}`": handle.model for role, handle in models.items() if handle.model != "tiny"}:
        notes.append(f"seeded models of 2 layers stand for {', '.join(large)}")
    if given.reward is not None:
        notes.append(f"recorded rewards stand for {given.scorer}")
    if images:
        notes.append("recorded images stand for the data's, one or two in each prompt")
    if environments(given):
        notes.append(f"recorded conversations stand for {', '.join(environments(given))}")
    return tuple(notes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context without progress bars and log lines."""
    from transformers.utils import logging as bars

    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
        bars.enable_progress_bar()  # type: ignore[no-untyped-call]
