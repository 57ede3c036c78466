"""`rlflow simulate --paper`: the DistFlow paper's curves, continued to 128 GPUs by one model of all of them.

Each of its eight constants is a term of a step's time T, in GPU seconds for a thousand tokens: the number of GPUs over
the rate in thousand tokens a second. P is the parameters in billions, N the number of GPUs, and b the rows of a step on
each node of 8 GPUs:

    T = work (1 + straggler log2(N / 8)) (1 + controller sqrt(P / 10) [verl]) + hub N (1 + hub_ppo [PPO]) [verl]
    work = fixed + P (compute (1 + critic [PPO]) + reload 1024 / b)

The logarithms of the figures are fitted by least squares. A forecast starts from the last figure of its curve: the
model says how the time grows from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlflow.errors import UserError

GPUS = 128


def show_paper(arguments: Sequence[str]) -> None:
    """Print the model, its errors and its forecasts; the last line is JSON.

    Args:
        arguments: The command's arguments: `--paper` alone, since there is nothing to set.

    Raises:
        UserError: There are other arguments.
    """
    if len(arguments) > 1:
        others = " ".join(argument for argument in arguments if argument != "--paper")
        raise UserError(
            f"`--paper` is given with `{others}`; the paper's figures are all that it reads, so leave that out"
        )
    print("\n".join(lines()))


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
        rate, low, high = found[curve]
        interval, name = f"{low:.1f} to {high:.1f}", "{:<4} {:>3} {}".format(*curve)
        yield f"  {name:<17} {rate:8.1f} {interval:>17} {_percent(beyond[curve]):>14} {_percent(last[curve]):>14}"
    yield f"  {'in all':<17} {'':8} {'':17} {_rms(beyond.values()):14.1%} {_rms(last.values()):14.1%}"
    yield f"  of the worst      {'':8} {'':17} {_worst(beyond):14.1%} {_worst(last):14.1%}"
    yield json.dumps(_nested(found))


def _nested(found: Mapping[Curve, Forecast]) -> dict[str, dict[str, dict[str, float]]]:
    nested: dict[str, dict[str, dict[str, float]]] = {}
    for (algorithm, model, system), (rate, _, _) in found.items():
        nested.setdefault(algorithm, {}).setdefault(model, {})[system] = round(rate, 1)
    return nested


def _percent(log_error: float) -> str:
    return f"{np.expm1(log_error):+.1%}"


def _rms(log_errors: Iterable[float]) -> float:
    return float(np.sqrt(np.mean(np.square(list(log_errors)))))


def _worst(errors: Mapping[Curve, float]) -> float:
    return max(abs(float(np.expm1(error))) for error in errors.values())


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


def gpu_seconds(constants: Vector, curves: Sequence[Curve], gpus: Sequence[int], hub_exponent: float = 1.0) -> Vector:
    """T of the module's docstring `[F]`: GPU seconds for a thousand tokens.

    Args:
        constants: `[8]`, in the order of `CONSTANTS`.
        curves: F curves, such as `("GRPO", "7B", "verl")`.
        gpus: F numbers of GPUs, one for each curve.
        hub_exponent: Exponent of the number of GPUs in the term `hub`.
    """
    fixed, compute, critic, reload, straggler, controller, hub, hub_ppo = constants
    p = np.array([PARAMETERS[model] for _, model, _ in curves])
    rows = np.array([BATCH_PER_NODE[algorithm, model] for algorithm, model, _ in curves])
    ppo = np.array([algorithm == "PPO" for algorithm, _, _ in curves])
    verl = np.array([system == "verl" for _, _, system in curves])
    n = np.array(gpus, dtype=float)
    work = fixed + p * (compute * (1 + critic * ppo) + reload * 1024 / rows)
    work = work * (1 + straggler * np.log2(n / 8)) * (1 + controller * np.sqrt(p / 10) * verl)
    through_hub: Vector = work + hub * 64 * (n / 64) ** hub_exponent * (1 + hub_ppo * ppo) * verl
    return through_hub


def fit(figures: Sequence[Figure], start: Vector = START, hub_exponent: float = 1.0, rounds: int = 60) -> Vector:
    """The constants `[8]` for which the sum of the squared `log_errors` over the figures is least."""
    curves, gpus = [figure.curve for figure in figures], [figure.gpus for figure in figures]
    measured = np.log([figure.gpus / figure.rate for figure in figures])

    def errors(constants: Vector) -> Vector:
        times = gpu_seconds(constants, curves, gpus, hub_exponent)
        return np.asarray(np.log(np.maximum(times, 1e-9)) - measured)

    return _least_squares(errors, start, rounds)


def log_errors(constants: Vector, figures: Sequence[Figure], hub_exponent: float = 1.0) -> Vector:
    """Logarithm of the model's time over the measured one `[F]`: 0.01 if the model is about 1% too slow."""
    times = gpu_seconds(
        constants, [figure.curve for figure in figures], [figure.gpus for figure in figures], hub_exponent
    )
    return np.asarray(np.log(times) - np.log([figure.gpus / figure.rate for figure in figures]))


def forecast(constants: Vector, figures: Sequence[Figure], curve: Curve, gpus: int, hub_exponent: float = 1.0) -> float:
    """Thousand tokens a second of a curve at `gpus` GPUs, from its last figure on; without one, the model's rate."""
    own = [figure for figure in figures if figure.curve == curve]
    rate = gpus / gpu_seconds(constants, [curve], [gpus], hub_exponent)[0]
    return float(rate * np.exp(log_errors(constants, own[-1:], hub_exponent)[0]) if own else rate)


def last_out_errors(figures: Sequence[Figure]) -> dict[Curve, float]:
    """The logarithmic error of each curve's last figure, when it is forecast from all other figures."""
    whole, errors = fit(figures), {}
    for curve in dict.fromkeys(figure.curve for figure in figures):
        last = [figure for figure in figures if figure.curve == curve][-1]
        rest = [figure for figure in figures if figure != last]
        errors[curve] = float(np.log(forecast(fit(rest, whole), rest, curve, last.gpus) / last.rate))
    return errors


def errors_beyond(figures: Sequence[Figure], known: int) -> dict[Curve, float]:
    """The logarithmic error of each curve's last figure, when it is forecast from those of at most `known` GPUs."""
    seen = [figure for figure in figures if figure.gpus <= known]
    constants = fit(seen)
    return {
        figure.curve: float(np.log(forecast(constants, seen, figure.curve, figure.gpus) / figure.rate))
        for figure in figures
        if figure.gpus > known
    }


def forecasts(figures: Sequence[Figure], gpus: int, draws: int = 200, seed: int = 0) -> dict[Curve, Forecast]:
    """The rate expected of each curve at `gpus` GPUs, and the ends of a 90% interval by bootstrap.

    A draw adds residuals of the fit, drawn with replacement, to the fitted figures, fits them again with one of
    `HUB_EXPONENTS`, and adds one of the errors of `last_out_errors` with a random sign.

    Returns:
        By curve, in thousand tokens a second: `(rate, low, high)`.
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
    ends = {curve: np.quantile(drawn[curve], (0.05, 0.95)).tolist() for curve in curves}
    return {curve: (forecast(constants, figures, curve, gpus), low, high) for curve, (low, high) in ends.items()}


def _least_squares(errors: Callable[[Vector], Vector], start: Vector, rounds: int) -> Vector:
    """Levenberg and Marquardt's method on `errors(constants)`; each constant is scaled by its own size."""
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


Algorithm = Literal["GRPO", "PPO"]
Model = Literal["7B", "32B", "72B"]
System = Literal["verl", "distflow"]
Curve = tuple[Algorithm, Model, System]  # what is measured at different sizes of cluster and else alike
Forecast = tuple[float, float, float]  # thousand tokens a second: what is expected; nine of ten lie between the others


@dataclass(frozen=True)
class Figure:
    """One bar of the paper's figures.

    Attributes:
        curve: Algorithm, model and system: `("GRPO", "7B", "verl")`.
        gpus: Number of GPUs.
        rate: Thousand tokens a second, all GPUs together.
    """

    curve: Curve
    gpus: int
    rate: float


# arXiv 2507.13833: thousand tokens a second of verl v0.4.0 and of DistFlow on Qwen2.5, read off the bars, so about 2 %
# uncertain. Weak scaling: the global batch grows with the nodes of 8 GPUs. Prompts of 2,048 tokens, responses of 4,096.
# What ran out of memory or was not run is left out.
BATCH_PER_NODE: dict[tuple[Algorithm, Model], int] = {
    ("GRPO", "7B"): 1024,
    ("GRPO", "32B"): 512,
    ("GRPO", "72B"): 256,
    ("PPO", "7B"): 1024,
    ("PPO", "32B"): 1024,
    ("PPO", "72B"): 512,
}

_RATES: dict[Curve, dict[int, float]] = {
    ("GRPO", "7B", "verl"): {8: 19.3, 16: 35.3, 32: 59.3, 64: 91.3},
    ("GRPO", "7B", "distflow"): {8: 22.0, 16: 44.7, 32: 86.0, 64: 170.0},
    ("GRPO", "32B", "verl"): {16: 10.2, 32: 18.8, 64: 34.5},
    ("GRPO", "32B", "distflow"): {16: 11.8, 32: 22.8, 64: 44.2},
    ("GRPO", "72B", "verl"): {32: 6.1, 64: 11.5},
    ("GRPO", "72B", "distflow"): {32: 7.6, 64: 14.9},
    ("PPO", "7B", "verl"): {8: 12.1, 16: 21.4, 32: 37.7, 64: 68.1},
    ("PPO", "7B", "distflow"): {8: 12.8, 16: 25.3, 32: 47.1, 64: 90.6},
    ("PPO", "32B", "verl"): {16: 6.6, 32: 12.1, 64: 22.9},
    ("PPO", "32B", "distflow"): {16: 7.1, 32: 14.1, 64: 27.6},
    ("PPO", "72B", "verl"): {64: 9.3},
    ("PPO", "72B", "distflow"): {32: 6.0, 64: 11.9},
}

FIGURES = tuple(Figure(curve, gpus, rate) for curve, rates in _RATES.items() for gpus, rate in rates.items())
CURVES = tuple(_RATES)

# How many times as fast as verl DistFlow is at context lengths in tokens; verl's 32B has no figure at 65,536.
CONTEXT_SPEEDUPS: dict[Model, dict[int, float]] = {
    "7B": {8192: 1.47, 16384: 1.62, 32768: 1.85, 65536: 1.98},
    "32B": {8192: 1.35, 16384: 1.32, 32768: 1.27},
}
