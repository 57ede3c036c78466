"""Calls a user's function: quantities by the names of its parameters, on a batch, in micro-batches, on ranks."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.conform.logprobs import MODEL
from rlflow.conform.terms import Given, View
from rlflow.errors import UserError, did_you_mean, one_line

# What a parameter's name asks for. The first name of each is the quantity's own; others are those of TRL and verl.
NAMES = {
    "logprobs": ("logprobs", "logps", "log_probs", "log_prob", "logprob", "logp", "new_logprobs", "per_token_logps"),
    "old_logprobs": ("old_logprobs", "old_logps", "old_log_probs", "old_log_prob", "old_logp", "old_per_token_logps"),
    "ref_logprobs": (
        *("ref_logprobs", "ref_logps", "ref_log_probs", "ref_log_prob", "ref_logprob", "ref_per_token_logps"),
    ),
    "rollout_logprobs": (
        *("rollout_logprobs", "rollout_logps", "rollout_log_probs", "rollout_log_prob", "sampling_per_token_logps"),
    ),
    "advantages": ("advantages", "advantage", "adv"),
    "mask": ("mask", "loss_mask", "response_mask", "completion_mask", "action_mask", "eos_mask"),
    "loss": ("loss", "losses", "loss_mat", "per_token_loss", "token_loss"),
    "rewards": ("rewards", "reward", "scores", "score"),
    "token_rewards": ("token_rewards", "token_level_rewards"),
    "values": ("values", "value"),
    "group": ("group", "groups", "group_ids", "prompt_index"),
    "index": ("index", "uid", "uids"),
    "group_size": ("group_size", "num_generations", "n_samples"),
    "rollout": ("rollout", "rollout_ids"),
    "lengths": ("lengths", "response_lengths"),
    "x": ("x", "tensor", "values", "advantages"),
    "token_scores": ("token_scores", "scores"),
    "share": ("share", "fraction"),
    "logits": ("logits",),
    "ids": ("ids", "input_ids", "token_ids"),
    "targets": ("targets", "target_ids"),
    "labels": ("labels",),
    "attention_mask": ("attention_mask", "attn"),
    "model": ("model",),
    "temperature": ("temperature",),
    "clip_low": ("clip_low", "eps_low", "epsilon_low", "clip_ratio_low", "cliprange_low"),
    "clip_high": ("clip_high", "eps_high", "epsilon_high", "clip_ratio_high", "cliprange_high"),
    "clip_range": ("clip_range", "cliprange", "clip_ratio", "clip_eps", "eps_clip", "clip", "epsilon", "eps"),
    "eps": ("eps", "epsilon"),
    "kl_coef": ("kl_coef", "beta", "kl_beta", "kl_loss_coef"),
    "gamma": ("gamma",),
    "lam": ("lam", "gae_lambda", "lambd"),
    "max_length": ("max_length", "max_response_length", "max_completion_length"),
    "total_tokens": ("total_tokens", "num_items_in_batch", "batch_num_tokens"),
    "total_rows": ("total_rows", "global_batch_size"),
    "world_size": ("world_size", "num_ranks", "dp_size"),
    "parts": ("parts", "micro_batches"),
    "reduce": ("reduce", "all_reduce"),
    "config": ("config",),
}
NEUTRAL = {"gamma": 1.0, "lam": 1.0, "temperature": 1.0}  # of a function that takes no such number
SETTINGS: Mapping[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "clip_range": 0.2,
    "eps": 1e-6,
    "kl_coef": 0.3,
    "gamma": 0.9,
    "lam": 0.8,
    "max_length": 16,
    "share": 0.25,
    "temperature": 1.0,
}


def quantity_of(parameter: str, known: Collection[str]) -> str | None:
    """The known quantity that the name of a parameter asks for; None if there is none."""
    return next((quantity for quantity, names in NAMES.items() if parameter in names and quantity in known), None)


class Config(dict[str, Any]):
    """Settings that are read as attributes or by `get`, as verl reads those of its actor and its algorithm."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"conform's config has no {name}; give it by --settings")


@dataclass(frozen=True)
class Function:
    """A function to be examined.

    Attributes:
        call: The function.
        name: Name of the function in messages.
        takes: The quantity of each parameter that is given one.
        constants: Arguments that do not change, by parameter.
        settings: Numbers of the algorithm: those of `SETTINGS`, and those that the user set.
        chosen: Settings that the user set.
        advantages: Whether advantages are given one for each token, `tokens`, or one for each row, `rows`.
        mask_is_bool: Whether the mask is given as bool, in place of numbers.
    """

    call: Callable[..., Any]
    name: str
    takes: Mapping[str, str]
    constants: Mapping[str, Any]
    settings: Mapping[str, Any]
    chosen: set[str]
    advantages: str = "tokens"
    mask_is_bool: bool = False

    @classmethod
    def of(
        cls,
        call: Callable[..., Any],
        name: str,
        known: set[str],
        settings: Mapping[str, Any],
        names: Mapping[str, str],
        clip: tuple[float, float],
    ) -> Function:
        """A function whose parameters are matched to quantities by their names.

        Args:
            call: The function.
            name: Name of the function in messages.
            known: Quantities that its interface has.
            settings: Settings that the user gave, by their name or by that of a parameter.
            names: Quantities of parameters whose names ask for none.
            clip: The range of the algorithm's clip, downwards and upwards.

        Raises:
            UserError: A parameter without a default asks for nothing known, or a name given is not a parameter's; or
                the function does not say what its parameters are.
        """
        try:
            parameters = inspect.signature(call).parameters
        except ValueError as error:  # of a function written in C
            raise UserError(
                f"the parameters of {name} cannot be read, so it cannot be called by their names; give a Python"
                " function that calls it"
            ) from error
        for given, meant in names.items():
            if given not in parameters:
                raise UserError(f"`--names` has {given!r}, which {name} does not take; give {' or '.join(parameters)}")
            if meant not in known:
                listed = ", ".join(sorted(known))
                raise UserError(
                    f"`--names.{given}` is {meant!r}, which such a function is not called with; give one of {listed}"
                )
        own = SETTINGS.keys() & known  # for a loss `eps` is the clip's range, for advantages what is added to a divisor
        chosen = {quantity_of(key, own) or quantity_of(key, SETTINGS) or key: value for key, value in settings.items()}
        takes: dict[str, str] = {}
        constants: dict[str, Any] = {}
        for each in parameters.values():
            quantity = names.get(each.name) or quantity_of(each.name, known)
            if each.name in settings and quantity is None:
                constants[each.name] = settings[each.name]
            elif (
                quantity is not None
                and quantity in known
                and (quantity != "eps" or "eps" in chosen or each.default is each.empty)
            ):  # an `eps` that has a default is the function's own
                takes[each.name] = quantity
            elif each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                listed = ", ".join(sorted(known))
                hint = did_you_mean(each.name, [name for quantity in known for name in NAMES[quantity]])
                raise UserError(
                    f"{name} has a parameter `{each.name}`, which is none of {listed}.{hint} Give its number by"
                    f" --settings.{each.name}, or name the quantity that it stands for by --names.{each.name}"
                )
        taken = {*takes.values()}
        neutral = {name: x for name, x in NEUTRAL.items() if not taken & {name, "config"}}
        return cls(
            call,
            name,
            takes,
            constants,
            {**SETTINGS, **neutral, **_ranges(taken, clip, chosen), **chosen},
            {*chosen},
        )

    def has(self, *quantities: str) -> bool:
        """Whether the function takes one of these quantities."""
        return not set(quantities).isdisjoint(self.takes.values())

    def output(self, view: View) -> Any:
        """The function's output for a view, joined from its parts where the view has parts."""
        if view.cut == "whole" or (view.cut == "micro-batches" and self.has("parts")):
            return self._called(view.given, {"parts": _parts(view)})
        number = len(view.case.parts) if view.cut == "ranks" else 1
        totals = {"total_tokens": view.given["mask"].sum(), "total_rows": len(view.given["mask"]), "world_size": number}
        parts = view.parts()
        if self.has("reduce"):
            outputs = on_ranks([partial(self._on_rank, part, totals) for part in parts])
        else:
            outputs = [self._called(part, {**totals, "parts": [torch.arange(len(part["mask"]))]}) for part in parts]
        tensors = [first_tensor(each, self.name) for each in outputs]
        if view.combine == "rows":
            return view.in_order(tensors)
        stacked = torch.stack(tensors)
        return stacked.mean(0) if view.combine == "mean" else stacked.sum(0)

    def _on_rank(self, part: Given, totals: Mapping[str, Any], reduce: Callable[[Tensor], Tensor]) -> Any:
        return self._called(part, {**totals, "reduce": reduce})

    def _called(self, given: Given, more: Mapping[str, Any]) -> Any:
        every = {**self._derived(given), **more}
        arguments = {name: every[quantity] for name, quantity in self.takes.items()}
        return self.call(**arguments, **self.constants)

    def _derived(self, given: Given) -> dict[str, Any]:
        """The quantities as they are given: those of a case, and those that are made from them."""
        every: dict[str, Any] = {**self.settings, **given, "model": MODEL, "reduce": lambda x: x}
        if self.advantages == "rows" and "advantages" in given:
            every["advantages"] = given["advantages"][:, 0]
        if "group" in given:
            every["index"] = np.array([f"prompt {each}" for each in given["group"].tolist()], dtype=object)
        if "scores" in given:
            every["token_scores"] = given["scores"]
        if "mask" in given:
            every.update(total_tokens=given["mask"].sum(), total_rows=len(given["mask"]), world_size=1)
            every["mask"] = given["mask"].bool() if self.mask_is_bool else given["mask"]
        s = self.settings
        verl = {"clip_ratio": s["clip_low"], "clip_ratio_low": s["clip_low"], "clip_ratio_high": s["clip_high"]}
        verl |= {"clip_ratio_c": 3.0, "gamma": s["gamma"], "lam": s["lam"], "global_batch_info": {}}
        every["config"] = Config({**verl, **s})
        return every


def _ranges(taken: set[str], clip: tuple[float, float], chosen: Mapping[str, Any]) -> dict[str, float]:
    """The clip's range as it is given; two different ends if a function takes both, in case it confuses them."""
    low, high = clip
    if "clip_range" in chosen:
        low = high = chosen["clip_range"]
    if "config" in taken or {"clip_low", "clip_high"} <= taken:
        return {"clip_low": low, "clip_high": high if high != low else 1.4 * low, "clip_range": low}
    return {"clip_low": low, "clip_high": low if "clip_range" in taken else high, "clip_range": low}


def _parts(view: View) -> list[Tensor]:
    rows = view.case.parts if view.cut != "whole" else (range(len(view.given["mask"])),)
    return [torch.tensor(list(part)) for part in rows]


def first_tensor(output: Any, name: str) -> Tensor:
    """The output, or the first of several, as a tensor.

    Raises:
        UserError: It is none.
    """
    first = output[0] if isinstance(output, tuple | list) and len(output) and isinstance(output[0], Tensor) else output
    if isinstance(first, dict) and isinstance(first.get("loss"), Tensor):
        first = first["loss"]
    if isinstance(first, np.ndarray | float | int | list) and not isinstance(first, bool):
        first = torch.as_tensor(first)
    if not isinstance(first, Tensor):
        raise UserError(f"{name} returned {first!r:.60}, a {type(first).__name__}; a tensor is expected")
    return first


def on_ranks(calls: Sequence[Callable[[Callable[[Tensor], Tensor]], Any]]) -> list[Any]:
    """The results of calls, one for each rank, that run at the same time; `reduce` adds up their tensors.

    Raises:
        UserError: They do not meet: one has ended where another waits.
    """
    turn = threading.Condition()
    totals: list[Tensor] = []
    waiting: list[Tensor] = []
    ended = 0
    outputs: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def reduce(x: Tensor) -> Tensor:
        with turn:
            number = len(totals)
            waiting.append(x.detach())
            if len(waiting) == len(calls):
                totals.append(torch.stack(waiting).sum(0))
                waiting.clear()
                turn.notify_all()
            turn.wait_for(lambda: len(totals) > number or ended > 0)
            if len(totals) == number:
                raise UserError(
                    "the ranks do not call `reduce` the same number of times, so one would wait for ever; call"
                    " it on every rank equally often"
                )
            return totals[number].clone()

    def run(rank: int) -> None:
        nonlocal ended
        try:
            outputs[rank] = calls[rank](reduce)
        except BaseException as error:
            errors.append(error)
        with turn:
            ended += 1
            turn.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        raise errors[0]
    return outputs


CORRECT_IT = "; correct the function"


@contextmanager
def errors_naming(name: str, view: View) -> Iterator[None]:
    """A context for calls of the user's function: an exception becomes an error of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} raised {type(error).__name__} on '{view}': {one_line(error)}{CORRECT_IT}") from error
