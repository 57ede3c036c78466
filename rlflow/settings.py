"""What a run is given beside its algorithm and data: numbers and choices, checked, that nothing changes afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlflow.databuffer.balance import Balance
from rlflow.errors import UserError

MOST_DEVICES = 1024  # of a machine
MOST_NODES = 65_536


@dataclass(frozen=True)
class Place:
    """Where a role lives. By default on all ranks, each with rows of its own.

    Args:
        ranks: Numbers and ranges, such as `1-3` or `[0, "4-7"]`; counted from 0 over all machines.
        nodes: Machines instead of ranks, all ranks of each: numbers and ranges from 0, or host names under Slurm.
        sequence_parallel_size: Consecutive ranks that share each sequence of a model's forward pass.
    """

    ranks: list[int | str] | int | str | None = None
    nodes: list[int | str] | int | str | None = None
    sequence_parallel_size: int = 1


Placed = Place | list[int | str] | int | str
"""What a config may write for a role: a `Place`, or just its ranks: `0`, `1-3`, `[0, "2-3"]`."""


@dataclass(frozen=True)
class Machines:
    """The ranks there are.

    Args:
        num_nodes: Machines.
        devices: Ranks of each.
    """

    num_nodes: int
    devices: int

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_nodes * self.devices

    def ranks_of_node(self, node: int) -> range:
        """The ranks of a machine."""
        return range(node * self.devices, (node + 1) * self.devices)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See the arguments of `Trainer`, which have these names.

    Raises:
        UserError: A number is out of its range.
    """

    run_dir: Path = Path("runs/default")
    max_steps: int | None = None
    max_epochs: int | None = None
    max_seconds: float | None = None
    devices: int = 1
    num_nodes: int = 1
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    val_check_interval: int | None = None
    limit_val_batches: int | None = None
    val_samples: int = 1
    log_every_n_steps: int = 1
    save_every_n_steps: int | None = None
    save_every_seconds: float | None = None
    save_last: int = 2
    save_top_k: int = 0
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"
    async_save: bool = False
    ckpt_path: str | None = None
    grace_s: float = 30.0
    keep_inputs: tuple[int, ...] = ()
    keep_inputs_of: tuple[str, ...] = ()
    balance: Balance = Balance()  # noqa: RUF009 - frozen
    logprob_gap_limit: float | None = None
    skip_spikes: float | None = None
    max_skipped: int = 3
    sync_bucket_bytes: int = 256 * 2**20
    fast_dev_run: bool = False
    placement: Mapping[str, Placed] | None = None
    max_staleness: int = 0
    partial_rollout: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_steps",
            "max_epochs",
            "devices",
            "num_nodes",
            "val_check_interval",
            "limit_val_batches",
            "val_samples",
            "log_every_n_steps",
            "save_every_n_steps",
            "sync_bucket_bytes",
            "partial_rollout",
            "max_skipped",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"`trainer.{name}` is {value}; give 1 or more")
        for name, most in (("devices", MOST_DEVICES), ("num_nodes", MOST_NODES)):
            if getattr(self, name) > most:
                raise UserError(f"`trainer.{name}` is {getattr(self, name)}; give at most {most:,}")
        if self.keep_inputs and min(self.keep_inputs) < 1:
            raise UserError(f"`trainer.keep_inputs` has {min(self.keep_inputs)}; steps count from 1")
        self._check_retention()
        if not 0 <= self.seed < 2**32:
            raise UserError(f"`seed` is {self.seed}; give a number from 0 to {2**32 - 1:,}")
        if self.max_staleness < 0:
            raise UserError(f"`trainer.max_staleness` is {self.max_staleness}; give 0 or more steps")
        if self.skip_spikes is not None and not self.skip_spikes > 1:
            raise UserError(
                f"`trainer.skip_spikes` is {self.skip_spikes}, and gradients vary around their median; give a number"
                " above 1, such as 10, or null to skip none"
            )
        if not 0 < self.grace_s < math.inf:
            raise UserError(f"`trainer.grace_s` is {self.grace_s}; give a number of seconds, more than 0")
        for name in ("max_seconds", "save_every_seconds", "logprob_gap_limit"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise UserError(f"`trainer.{name}` is {limit}; give more than 0, or null for none")

    def _check_retention(self) -> None:
        if self.save_last < 2:
            raise UserError(f"`trainer.save_last` is {self.save_last}; give 2 or more: the last may be damaged")
        if self.save_top_k < -1:
            raise UserError(f"`trainer.save_top_k` is {self.save_top_k}; give a number of checkpoints, or -1 for all")
        if self.save_top_k > 0 and self.monitor is None:
            raise UserError(
                f"`trainer.save_top_k` is {self.save_top_k} and `trainer.monitor` is not set, so no checkpoint is"
                " better than another; name a metric"
            )
        if self.save_top_k < 1 and self.monitor is not None:
            raise UserError(
                f"`trainer.monitor` is {self.monitor!r} and `trainer.save_top_k` is {self.save_top_k}, so the metric"
                " decides nothing; give a number of best checkpoints"
            )
        if self.save_top_k and not self.saves_checkpoints:
            raise UserError(
                f"`trainer.save_top_k` is {self.save_top_k}, and no checkpoint is written; set"
                " `trainer.save_every_n_steps` or `trainer.save_every_seconds`"
            )

    @property
    def saves_checkpoints(self) -> bool:
        """Whether checkpoints are written."""
        return self.save_every_n_steps is not None or self.save_every_seconds is not None

    @property
    def machines(self) -> Machines:
        """The ranks that a run has."""
        return Machines(self.num_nodes, self.devices)

    @property
    def cuts_off(self) -> bool:
        """Whether long responses are cut off, and continued with the next draw of prompts."""
        return self.partial_rollout is not None

    def for_validation(self) -> Settings:
        """Those of `Trainer.validate`: in a folder beside the run's own, whose model may be what it validates."""
        return replace(self, run_dir=self.run_dir.with_name(f"{self.run_dir.name}-validate"), max_steps=1)
