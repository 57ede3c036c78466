"""`rlflow conform`: tests whether a user's loss, advantages or logprobs are those of an algorithm."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from inspect import isclass
from pathlib import Path
from typing import Any, Literal

import torch

from rlflow.commands.parser import call
from rlflow.conform.diagnosis import Diagnosis, Kind, algorithm_named
from rlflow.conform.diagnosis import conform as conform_function
from rlflow.conform.trl import is_trainer, loss_settings, trainer_advantages, trainer_loss
from rlflow.dotted_path import object_at
from rlflow.errors import UserError
from rlflow.process.status import CommandExit

SHOWN = 4  # cases that no change explains


def conform(
    algorithm: str = "GRPO",
    loss: str | None = None,
    advantages: str | None = None,
    aggregation: str | None = None,
    normalization: str | None = None,
    logprobs: str | None = None,
    micro: Literal["sum", "mean"] | None = None,
    ranks: Literal["sum", "mean"] | None = None,
    settings: dict[str, Any] | None = None,
    names: dict[str, str] | None = None,
    dtype: Literal["float64", "float32"] = "float64",
    museum: bool = False,
) -> None:
    """Test whether a function computes what an algorithm does, and name the terms that differ.

    It is called on constructed cases: on a batch, and on its parts if it says how they are joined. Exit code 0: it
    conforms, or differs by conventions alone; 1: a term differs; 2: it cannot be called.

    Example:
        rlflow conform --algorithm GRPO --loss my_losses:clipped

    Args:
        algorithm: Algorithm that it should be: GRPO, DrGRPO, DAPO, RLOO, PPO, GSPO, CISPO and others.
        loss: Function of logprobs, advantages and a mask that returns the loss, or the loss of each token; or a class
            derived from TRL's GRPOTrainer.
        advantages: Function of rewards that returns advantages; or a class derived from TRL's GRPOTrainer.
        aggregation: Function of a loss per token and a mask that returns one number.
        normalization: Function of numbers and a mask that whitens them.
        logprobs: Function of logits, or of a model, and token ids that returns logprobs.
        micro: Reduction of the values of micro-batches in the trainer: it adds them up, or takes their mean.
        ranks: Reduction of the values of ranks in the trainer.
        settings: Numbers of the algorithm, or arguments of the function, by name: --settings.kl_coef 0.04.
        names: Quantities of parameters whose names do not say them: --names.lp logprobs.
        dtype: Dtype of the tensors that it is called with.
        museum: Run it on the bugs and the right functions of docs/museum.md, in place of a function.

    Raises:
        UserError: There is no such function, or it cannot be called.
    """
    given = {
        "loss": loss,
        "advantages": advantages,
        "aggregation": aggregation,
        "normalization": normalization,
        "logprobs": logprobs,
    }
    paths: dict[Any, str] = {kind: path for kind, path in given.items() if path is not None}
    if museum == bool(paths):
        raise UserError("give one function or more, such as --loss my_module:my_loss, or --museum")
    if museum:
        raise CommandExit(_show_museum())
    name, paper = algorithm_named(algorithm)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="rlflow-conform-") as scratch:
        for kind, path in paths.items():
            options: dict[str, Any] = {"micro": micro, "ranks": ranks, "settings": settings or {}, "names": names}
            function = _function(kind, path, options, Path(scratch))
            found = conform_function(kind, function, name, name=path, **options, dtype=getattr(torch, dtype))
            print(f"{kind}: {path} compared with {name} ({paper.source})")
            print("\n".join(lines(found)))
            verdicts.append(found.verdict)
    raise CommandExit(int("differs" in verdicts))


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow conform`."""
    call(conform, arguments)


def _function(kind: Kind, path: str, options: dict[str, Any], scratch: Path) -> Callable[..., Any]:
    """The function that the path names; for a trainer of TRL's, with the options that it needs."""
    found = object_at(path.replace(":", "."), f"`--{kind}` is {path!r}")
    if is_trainer(found):
        if kind not in ("loss", "advantages"):
            raise UserError(f"`--{kind}` is {path!r}, a trainer; its loss and its advantages can be examined")
        of_trainer = options["settings"]
        options["settings"] = {}
        if kind == "advantages":
            return trainer_advantages(found, of_trainer, scratch)
        options.update(settings=loss_settings(of_trainer), micro="sum", ranks="mean")
        return trainer_loss(found, of_trainer, scratch)
    if isclass(found) or not callable(found):
        raise UserError(
            f"`--{kind}` is {path!r}, which is not a function; name one, or a subclass of TRL's GRPOTrainer"
        )
    function: Callable[..., Any] = found
    return function


def lines(found: Diagnosis) -> list[str]:
    """The findings, as a table of terms and notes."""
    rows = [("convention" if each.is_convention else "differs", each.term, each.text) for each in found.changes]
    rows.sort(key=lambda row: row[0], reverse=True)
    rows += [("differs", term, text) for term, text in found.lost]
    for number, (case, term, numbers) in enumerate(found.unexplained[:SHOWN]):
        first = number == 0  # later cases have the terms of earlier ones in them
        rows.append(("differs" if first else "also", term if first else "", f"{case}: {numbers}"))
    if len(found.unexplained) > SHOWN:
        rows.append(("also", "", f"in {len(found.unexplained) - SHOWN} more cases"))
    rows += [("or", ", ".join(x.term for x in each), "; ".join(x.text for x in each)) for each in found.others]
    rows += [("note", "", text) for text in found.notes]
    widths = [max([0, *(len(row[column]) for row in rows)]) for column in range(2)]
    table = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows]
    phrases = {"conforms": "it conforms", "convention": "it conforms, with conventions of its own"}
    return [*table, f"  {phrases.get(found.verdict, 'it differs')} ({found.form})"]


def _show_museum() -> int:
    from rlflow.conform.museum import EVERY

    missed = 0
    for each in EVERY:
        found = each.found()
        terms = ", ".join(sorted(found.terms)) or ", ".join(change.term for change in found.changes)
        as_expected = each.is_named(found)
        missed += not as_expected
        mark = "" if as_expected else "  NOT AS EXPECTED"
        print(f"{found.verdict:<10}  {each.name:<46}  {terms}{mark}")
    print(f"{len(EVERY) - missed} of {len(EVERY)} as expected")
    return int(missed > 0)
