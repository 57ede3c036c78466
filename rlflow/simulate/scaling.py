"""One model of all throughput curves of the DistFlow paper, and its fit: eight constants, each a term of a step's time.

In GPU seconds for a thousand tokens, which is the number of GPUs over the rate, with P the parameters in thousand
millions, N the GPUs, and b the rows of a step on each node of 8 GPUs:

    T = work (1 + straggler log2(N / 8)) (1 + controller sqrt(P / 10) [verl]) + hub N (1 + hub_ppo [PPO]) [verl]
    work = fixed + P (compute (1 + critic [PPO]) + reload 1024 / b)

The logarithms of the figures are fitted by least squares. A forecast starts from the last figure of its curve: the
model says how the time grows from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.simulate.figures import BATCH_PER_NODE, Curve, Figure, Model

Vector = NDArray[np.float64]

# Thousand millions of parameters, from the models' configs; see `rlflow.models.sizes`.
PARAMETERS: dict[Model, float] = {"7B": 7.62, "32B": 32.76, "72B": 72.71}

CONSTANTS: dict[str, str] = {
    "fixed": "time of a token whatever the model: scheduling, sampling, tokenizing",
    "compute": "per thousand million parameters: generating, scoring and training a token",
    "critic": "what PPO computes on top, as a share of the line above",
    "reload": "per thousand million parameters and step: moving weights, shared by the step's rows",
    "straggler": "growth with each doubling of the GPUs: collectives, and waiting for the slowest",
    "controller": "verl computes slower, by this share at 10 thousand million parameters, as their square root",
    "hub": "verl: through one controller, for each GPU that it serves",
    "hub_ppo": "how much more of that PPO has, as a share; less if negative",
}
START = np.array([0.15, 0.02, 1.0, 0.01, 0.02, 0.05, 0.005, 0.0])
HUB_EXPONENTS = (0.85, 1.0, 1.15)  # of N, between which an interval does not choose; the model's is 1


@dataclass(frozen=True)
class Forecast:
    """What is expected of a curve, thousand tokens a second; nine of ten figures lie between `low` and `high`."""

    rate: float
    low: float
    high: float


def gpu_seconds(constants: Vector, curves: Sequence[Curve], gpus: Sequence[int], hub_exponent: float = 1.0) -> Vector:
    """T of the module's text `[F]`, for each pair of curve and number of GPUs."""
    fixed, compute, critic, reload, straggler, controller, hub, hub_ppo = constants
    p = np.array([PARAMETERS[curve.model] for curve in curves])
    rows = np.array([BATCH_PER_NODE[curve.algorithm, curve.model] for curve in curves])
    ppo = np.array([curve.algorithm == "PPO" for curve in curves])
    verl = np.array([curve.system == "verl" for curve in curves])
    n = np.array(gpus, dtype=float)
    work = fixed + p * (compute * (1 + critic * ppo) + reload * 1024 / rows)
    work = work * (1 + straggler * np.log2(n / 8)) * (1 + controller * np.sqrt(p / 10) * verl)
    through_hub: Vector = work + hub * 64 * (n / 64) ** hub_exponent * (1 + hub_ppo * ppo) * verl
    return through_hub


def fit(figures: Sequence[Figure], start: Vector = START, hub_exponent: float = 1.0, rounds: int = 60) -> Vector:
    """The constants `[8]` with the least squared logarithmic errors over the figures."""
    curves, gpus = [figure.curve for figure in figures], [figure.gpus for figure in figures]
    measured = np.log([figure.gpus / figure.rate for figure in figures])

    def errors(constants: Vector) -> Vector:
        times = gpu_seconds(constants, curves, gpus, hub_exponent)
        return np.asarray(np.log(np.maximum(times, 1e-9)) - measured)

    return _least_squares(errors, start, rounds)


def log_errors(constants: Vector, figures: Sequence[Figure], hub_exponent: float = 1.0) -> Vector:
    """By how much the model's time exceeds the measured one `[F]`, as a logarithm."""
    times = gpu_seconds(
        constants, [figure.curve for figure in figures], [figure.gpus for figure in figures], hub_exponent
    )
    return np.asarray(np.log(times) - np.log([figure.gpus / figure.rate for figure in figures]))


def forecast(constants: Vector, figures: Sequence[Figure], curve: Curve, gpus: int, hub_exponent: float = 1.0) -> float:
    """Thousand tokens a second of a curve at another size, from its last figure on; the model's alone without any."""
    own = [figure for figure in figures if figure.curve == curve]
    rate = gpus / gpu_seconds(constants, [curve], [gpus], hub_exponent)[0]
    return float(rate * np.exp(log_errors(constants, own[-1:], hub_exponent)[0]) if own else rate)


def last_out_errors(figures: Sequence[Figure]) -> dict[Curve, float]:
    """The logarithmic error of each curve's last figure, as forecast from all figures but that one."""
    whole, errors = fit(figures), {}
    for curve in dict.fromkeys(figure.curve for figure in figures):
        last = [figure for figure in figures if figure.curve == curve][-1]
        rest = [figure for figure in figures if figure != last]
        errors[curve] = float(np.log(forecast(fit(rest, whole), rest, curve, last.gpus) / last.rate))
    return errors


def errors_beyond(figures: Sequence[Figure], known: int) -> dict[Curve, float]:
    """The logarithmic error of each curve's last figure, as forecast from all figures of at most `known` GPUs."""
    seen = [figure for figure in figures if figure.gpus <= known]
    constants = fit(seen)
    return {
        figure.curve: float(np.log(forecast(constants, seen, figure.curve, figure.gpus) / figure.rate))
        for figure in figures
        if figure.gpus > known
    }


def forecasts(figures: Sequence[Figure], gpus: int, draws: int = 200, seed: int = 0) -> dict[Curve, Forecast]:
    """What is expected at `gpus` GPUs of each curve, with an interval of nine tenths by bootstrap.

    A draw adds residuals of the fit, drawn with replacement, to the fitted figures, fits them with one of
    `HUB_EXPONENTS`, and adds an error of those that the last figures are forecast with.
    """
    generator = np.random.default_rng(seed)
    constants = fit(figures)
    # Errors of the fit are smaller than those of the figures, by the constants that it spent.
    residuals = log_errors(constants, figures) * np.sqrt(len(figures) / (len(figures) - len(constants)))
    last = np.array(list(last_out_errors(figures).values()))
    curves = list(dict.fromkeys(figure.curve for figure in figures))
    drawn = {curve: np.empty(draws) for curve in curves}
    for draw in range(draws):
        exponent = HUB_EXPONENTS[draw % len(HUB_EXPONENTS)]
        noise = np.exp(generator.choice(residuals, len(figures)))
        fitted = gpu_seconds(constants, [f.curve for f in figures], [f.gpus for f in figures])
        again = [Figure(f.curve, f.gpus, f.gpus / t) for f, t in zip(figures, fitted * noise, strict=True)]
        refitted = fit(again, constants, exponent, rounds=8)
        for curve in curves:
            error = generator.choice(last) * generator.choice((-1, 1))
            drawn[curve][draw] = forecast(refitted, figures, curve, gpus, exponent) * np.exp(error)
    return {
        curve: Forecast(forecast(constants, figures, curve, gpus), *np.quantile(drawn[curve], (0.05, 0.95)).tolist())
        for curve in curves
    }


def _least_squares(errors: Callable[[Vector], Vector], start: Vector, rounds: int) -> Vector:
    """Levenberg and Marquardt's method; each constant is scaled by its own size."""
    constants, damping = start.copy(), 1e-3
    current = errors(constants)
    for _ in range(rounds):
        scale = np.maximum(np.abs(constants), 1e-3)
        steps = np.diag(1e-5 * scale)
        slopes = np.stack([(errors(constants + s) - errors(constants - s)) / 2e-5 for s in steps], axis=1)
        for _ in range(12):
            normal = slopes.T @ slopes + damping * np.eye(len(constants))
            moved: Vector = constants - np.linalg.solve(normal, slopes.T @ current) * scale
            tried = errors(moved)
            if tried @ tried < current @ current:
                gained = 1 - (tried @ tried) / (current @ current)
                constants, current, damping = moved, tried, damping / 5
                break
            damping *= 4
        else:
            return constants
        if gained < 1e-10:
            return constants
    return constants
