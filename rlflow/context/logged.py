"""The arguments of `RLModule.log`, which are those of Lightning's `self.log`; those without a meaning are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.metrics import Kind, MetricOptions

ReduceFx = str | Callable[..., Any]
_KINDS: Mapping[str, Kind] = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "largest", "min": "smallest"}
_OF_TORCH = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}


def check_value(name: str, value: Any, mask: Any) -> None:
    """Refuse what cannot be logged."""
    if name == "step":
        raise _refused(name, "the name under which each step's number is recorded; take another")
    shape = list(value.shape) if isinstance(value, Tensor) else []
    if not isinstance(value, Tensor | Number):
        raise _refused(name, f"a {type(value).__name__}; give a number, or a tensor with a number of each row")
    if mask is not None and not isinstance(mask, Tensor):
        raise _refused(name, f"{mask!r:.40} as its mask; write what it is, such as `prog_bar={mask!r:.40}`")
    if len(shape) > 1 and mask is None:
        raise _refused(name, f"{shape} without a mask; padding would count. Pass `mask=`")
    if mask is not None and list(mask.shape) != shape:
        raise _refused(name, f"{shape} with a mask of {list(mask.shape)}; give both one shape")


def how_logged(name: str, prog_bar: bool, logger: bool | None, reduce_fx: ReduceFx) -> MetricOptions:
    """Logging and reduction of a module's metric."""
    word = reduce_fx if isinstance(reduce_fx, str) else next((w for w, f in _OF_TORCH.items() if f is reduce_fx), "")
    if word.lower() not in _KINDS:
        raise _refused(name, f"`reduce_fx={reduce_fx!r:.60}`; give mean, sum, max or min")
    return MetricOptions(_KINDS[word.lower()], by_module=True, prog_bar=prog_bar, logger=logger is not False)


def check_ranks(name: str, sync_dist: bool | None, rank_zero_only: bool) -> None:
    """Refuse arguments by which a metric would not be over all ranks."""
    for argument, given in (("sync_dist=False", sync_dist is False), ("rank_zero_only=True", rank_zero_only)):
        if given:
            raise _refused(name, f"`{argument}`, and a metric is over the rows of all ranks; leave it out")


def check_unused(
    name: str, enable_graph: bool, sync_dist_group: Any, add_dataloader_idx: bool, metric_attribute: str | None
) -> None:
    """Refuse arguments that nothing here would read."""
    if enable_graph:
        raise _refused(name, "`enable_graph`, and what is logged has no gradient; leave it out")
    if sync_dist_group is not None:
        raise _refused(name, "`sync_dist_group`, and a metric is over the rows of all ranks; leave rows out by `mask`")
    if not add_dataloader_idx:
        raise _refused(name, "`add_dataloader_idx`, and a name is as it was written in any case; leave it out")
    if metric_attribute is not None:
        raise _refused(name, "`metric_attribute`, and a torchmetrics.Metric cannot be logged; log numbers of rows")


def check_weight(name: str, value: Tensor, how: MetricOptions, batch_size: int | None) -> None:
    """Refuse a `batch_size` that weights nothing."""
    if batch_size is None:
        return
    if value.dim():
        raise _refused(name, f"`batch_size` with {list(value.shape)}, whose entries count one each; leave it out")
    if how.kind != "mean":
        raise _refused(name, "`batch_size`, which weights a mean, with another `reduce_fx`; leave it out")
    if batch_size < 0:
        raise _refused(name, f"`batch_size={batch_size}`; give the number of rows that the value is of")


def check_levels(name: str, on_step: bool | None, on_epoch: bool | None, validates: bool) -> None:
    """Refuse `on_step` and `on_epoch` other than Lightning's defaults: a step in nodes, all rows in validation."""
    if on_step not in (None, not validates):
        what = "is over all held-out rows" if validates else "is logged in each step; `log_every_n_steps` records fewer"
        raise _refused(name, f"`on_step={on_step}`, and a metric {what}. Leave it out")
    if on_epoch not in (None, validates):
        what = "over all held-out rows" if validates else "of its step; a callback's `on_step_end` may add up steps"
        raise _refused(name, f"`on_epoch={on_epoch}`, and a metric is {what}. Leave it out")


def _refused(name: str, what: str) -> UserError:
    return UserError(f"log({name!r}) was given {what}")
