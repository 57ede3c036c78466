"""`rlflow simulate --paper`: the DistFlow paper's curves, continued to 128 GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from rlflow.errors import UserError
from rlflow.simulate.figures import CURVES, FIGURES, Curve
from rlflow.simulate.scaling import CONSTANTS, Forecast, errors_beyond, fit, forecasts, last_out_errors, log_errors

GPUS = 128


class PaperForecast:
    """What `rlflow simulate --paper` shows."""

    def show(self) -> None:
        """Print the model, its errors and its forecasts; the last line is JSON."""
        print("\n".join(lines()))


def read_paper(arguments: Sequence[str]) -> PaperForecast:
    """What the command shows; it takes no settings.

    Raises:
        UserError: It was given some.
    """
    if len(arguments) > 1:
        others = " ".join(argument for argument in arguments if argument != "--paper")
        raise UserError(
            f"`--paper` is given with `{others}`; the paper's figures are all that it reads, so leave that out"
        )
    return PaperForecast()


def lines() -> Iterator[str]:
    """The model, its errors and its forecasts; the last line is JSON."""
    constants = fit(FIGURES)
    yield f"DistFlow, arXiv 2507.13833: {len(FIGURES)} figures at 8 to 64 GPUs, one model of {len(constants)} constants"
    for (name, meaning), value in zip(CONSTANTS.items(), constants, strict=True):
        yield f"  {name:<10} {value:8.4f}  {meaning}"
    yield f"error of the fit: {_rms(log_errors(constants, FIGURES)):.1%} (root of the mean square)"
    yield ""
    yield f"thousand tokens/s at {GPUS} GPUs (nine tenths of the figures lie within), and what was known to be wrong:"
    yield f"  {'':17} {'at 128':>8} {'interval':>17} {'64 from 8-32':>14} {'last one out':>14}"
    found = forecasts(FIGURES, GPUS)
    beyond, last = errors_beyond(FIGURES, known=32), last_out_errors(FIGURES)
    for curve in CURVES:
        expected = found[curve]
        interval = f"{expected.low:.1f} to {expected.high:.1f}"
        yield (
            f"  {curve!s:<17} {expected.rate:8.1f} {interval:>17} {_percent(beyond[curve]):>14}"
            f" {_percent(last[curve]):>14}"
        )
    yield f"  {'in all':<17} {'':8} {'':17} {_rms(beyond.values()):14.1%} {_rms(last.values()):14.1%}"
    yield f"  of the worst      {'':8} {'':17} {_worst(beyond):14.1%} {_worst(last):14.1%}"
    yield json.dumps(_nested(found))


def _nested(found: Mapping[Curve, Forecast]) -> dict[str, dict[str, dict[str, float]]]:
    nested: dict[str, dict[str, dict[str, float]]] = {}
    for curve, expected in found.items():
        nested.setdefault(curve.algorithm, {}).setdefault(curve.model, {})[curve.system] = round(expected.rate, 1)
    return nested


def _percent(log_error: float) -> str:
    return f"{np.expm1(log_error):+.1%}"


def _rms(log_errors: Iterable[float]) -> float:
    return float(np.sqrt(np.mean(np.square(list(log_errors)))))


def _worst(errors: Mapping[Curve, float]) -> float:
    return max(abs(float(np.expm1(error))) for error in errors.values())
