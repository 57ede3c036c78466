"""The settings of a run, and the placement of roles."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Literal

from rlflow.databuffer.balance import Balance
from rlflow.errors import UserError
from rlflow.process.devices import accelerators
from rlflow.values.response_settings import SamplingSettings

MOST_DEVICES = 1024  # of a machine
MOST_NODES = 65_536
VALIDATION = ("val/", "val_")  # how names of metrics of a validation begin; `value/loss` is one of training


@dataclass(frozen=True)
class Place:
    """The ranks that a role is on. By default a role is on all ranks, and each rank has its own rows.

    Args:
        ranks: Ranks as numbers and ranges, such as `1-3` or `[0, "4-7"]`. Ranks are counted from 0 over all machines.
        sequence_parallel_size: Number of consecutive ranks that share each sequence of a model's forward pass.
        tensor_parallel_size: Number of consecutive ranks that share each layer of a model, in training and in scoring.
            Needs `strategy: fsdp`. If sequences are shared too, `sequence_parallel_size` such groups share a sequence.
        expert_parallel_size: Number of consecutive ranks that share the experts of each layer; each rank holds some of
            the experts. Needs `strategy: fsdp`.
    """

    ranks: list[int | str] | int | str | None = None
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1


Placed = Place | list[int | str] | int | str
"""Forms that a config may write for a role: a `Place`, or just its ranks: `0`, `1-3`, `[0, "2-3"]`."""


@dataclass(eq=False)
class Settings:
    """The arguments of `Trainer` that are numbers or choices. Each of them is defined only here.

    Args:
        run_dir: Folder of the results. If it has results of an earlier run, they are moved to a folder of another name.
        max_steps: Maximum number of steps; a step is one batch of prompts through the whole graph.
        max_epochs: Maximum number of passes over the training rows.
        max_seconds: Stop after the first step at whose end the run has lasted this many seconds.
        devices: Number of processes on this machine, one for each accelerator. `auto` for one process on each GPU, or
            for one process on the CPU if there is no GPU.
        num_nodes: Number of machines.
        accelerator: `cpu`, `cuda` (also `gpu`), or `auto` for the one that the machine has.
        precision: Precision of training by Lightning's name, such as `bf16-mixed`. Set it here or in the strategy.
            `mixed` keeps weights in float32, `true` does not. None for the precision of the strategy.
        val_check_interval: Steps between validations. There is also one before the first step and one after the last.
        limit_val_batches: Maximum number of batches in a validation, each of `data.prompts_per_step` held-out prompts.
        val_samples: Responses to each held-out prompt, sampled by `val_sampling`; with 2 or more, pass@k is logged.
        val_sampling: Settings with which validations, `rlflow test` and `rlflow predict` sample responses; a response
            at temperature 0 is generated in addition. None of them is trained on, so `top_p` and `min_p` need no
            `top_k` here. None to sample them as in training.
        log_every_n_steps: Log metrics and samples once in this number of steps. Steps with a validation are always
            logged.
        log_samples: Maximum number of samples that are logged in one step.
        log_samples_every_n_steps: Log samples once in this number of steps; None for `log_every_n_steps`.
        profiler: `simple` prints, at the end, the seconds of each node and of the other parts of a step. `pytorch`
            writes what torch's profiler records in steps 3 to 5 to `profiler/` of the run's folder. None for neither.
        save_every_n_steps: Steps between checkpoints; there is also one at the end, and the model is written with each
            checkpoint. None for only the model at the end.
        save_every_seconds: Seconds after which the next step is followed by a checkpoint. Can be combined with
            `save_every_n_steps`.
        save_last: Number of latest checkpoints that are kept, at least 2, since one may be damaged. True for 2.
        save_top_k: Number of best checkpoints by `monitor` that are kept; -1 for all. They may be among the latest.
        monitor: Metric by which `save_top_k` compares checkpoints, with its value when each checkpoint was written.
        mode: Whether a smaller (`min`) or a larger (`max`) value of `monitor` is better.
        async_save: Write checkpoints and models in the background. A step then waits only until its rank's part of the
            state is copied to the CPU's memory.
        ckpt_path: Checkpoint from which the run resumes bit-exactly: `last` of `run_dir`, `best` of `run_dir` by
            `monitor`, or a checkpoint's folder. `auto` for the last checkpoint, or for a new run if there is none.
        grace_s: Seconds that the run has to end after a signal (SIGTERM, SIGHUP, SIGUSR1, Ctrl-C). In this time it
            finishes or drops the step, and saves. A second signal ends the run immediately.
        dump_steps: Steps whose node inputs and outputs are stored for `rlflow replay`. The inputs of a node that
            raises are always stored.
        dump_nodes: The nodes to which `dump_steps` applies; empty for all.
        balance: `auto` moves rows between ranks to even out their tokens where this saves time; `off` does not. Or a
            `Balance`, which has the constants of this decision.
        logprob_gap_limit: Largest mean difference of rollout and training logprobs. None for 1e-3 (0.05 in bf16, 0.01
            in fp16) and two more limits, which follow from the run itself, see `sync/logprob_gap_uncertain`.
        grad_norm_spike_limit: Skip an update if its gradient norm is more than this many times the median of the role's
            last 32 norms above 0; None to skip none. With an infinite or NaN norm, all ranks always skip the update.
        max_skipped: Number of skipped updates of a role in a row after which the run ends.
        sync_bucket_bytes: Bytes of weights that a weight sync gathers and sends to the rollout engine at a time.
        fast_dev_run: Run only two steps, or the given number, with validation, as a test of all parts. Only logs and
            traces are written, in `<run_dir>-dev`.
        placement: Ranks by role. `actor.rollout` is for the engine of `actor`, and `rollout` for the engines of all
            other policies. A role that is not named is on all ranks, or with the role whose node `uses` it.
        max_staleness: Number of steps that generation runs ahead of training; its weights are then this many steps old.
            `placement` must give `rollout` its own ranks.
        partial_rollout: Maximum number of tokens (in a conversation, of the policy's tokens) that one draw of prompts
            adds to a response. A longer response is continued in the next draw, with newer weights. None for no limit.
        seed: Seed of all random numbers of the run.

    Raises:
        UserError: A number is out of its range.
    """

    run_dir: str = "runs/default"
    max_steps: int | None = None
    max_epochs: int | None = None
    max_seconds: float | None = None
    devices: int | Literal["auto"] = 1
    num_nodes: int = 1
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = "auto"
    precision: str | int | None = None
    val_check_interval: int | None = None
    limit_val_batches: int | None = None
    val_samples: int = 1
    val_sampling: SamplingSettings | None = None
    log_every_n_steps: int = 1
    log_samples: int = 4
    log_samples_every_n_steps: int | None = None
    profiler: Literal["simple", "pytorch"] | None = None
    save_every_n_steps: int | None = None
    save_every_seconds: float | None = None
    save_last: int | bool = 2
    save_top_k: int = 0
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"
    async_save: bool = False
    ckpt_path: str | None = None
    grace_s: float = 30.0
    dump_steps: Sequence[int] = ()
    dump_nodes: Sequence[str] = ()
    balance: Literal["auto", "off"] | Balance = "auto"
    logprob_gap_limit: float | None = None
    grad_norm_spike_limit: float | None = None
    max_skipped: int = 3
    sync_bucket_bytes: int = 256 * 2**20
    fast_dev_run: bool | int = False
    placement: Mapping[str, Placed] | None = None
    max_staleness: int = 0
    partial_rollout: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.run_dir = os.fspath(self.run_dir)
        if not Path(self.run_dir.strip()).name.strip(".") or not self.run_dir.isprintable():
            raise UserError(f"`trainer.run_dir` is {self.run_dir!r}; name a folder, such as runs/mine")
        if self.save_last is True:
            self.save_last = 2
        if self.accelerator == "gpu":
            self.accelerator = "cuda"
        if self.devices in ("auto", -1):
            self.devices = accelerators(self.accelerator)
        for name in (
            "max_steps",
            "max_epochs",
            "devices",
            "num_nodes",
            "val_check_interval",
            "limit_val_batches",
            "val_samples",
            "log_every_n_steps",
            "log_samples",
            "log_samples_every_n_steps",
            "save_every_n_steps",
            "sync_bucket_bytes",
            "partial_rollout",
            "max_skipped",
        ):
            value = getattr(self, name)
            if not isinstance(value, Integral | None):
                raise UserError(f"`trainer.{name}` is {value!r:.60}; give a whole number, 1 or more")
            if value is not None and value < 1:
                raise UserError(f"`trainer.{name}` is {value}; give 1 or more")
        for name, most in (("devices", MOST_DEVICES), ("num_nodes", MOST_NODES)):
            if getattr(self, name) > most:
                raise UserError(f"`trainer.{name}` is {getattr(self, name)}; give at most {most:,}")
        if self.dump_steps and min(self.dump_steps) < 1:
            raise UserError(f"`trainer.dump_steps` has {min(self.dump_steps)}; steps count from 1")
        self._check_retention()
        if not 0 <= self.seed < 2**32:
            raise UserError(f"`seed` is {self.seed}; give a number from 0 to {2**32 - 1:,}")
        if self.max_staleness < 0:
            raise UserError(f"`trainer.max_staleness` is {self.max_staleness}; give 0 or more steps")
        if self.grad_norm_spike_limit is not None and not self.grad_norm_spike_limit > 1:
            raise UserError(
                f"`trainer.grad_norm_spike_limit` is {self.grad_norm_spike_limit}, and gradients vary around their"
                " median; give a number above 1, such as 10, or null to skip none"
            )
        if not 0 < self.grace_s < math.inf:
            raise UserError(f"`trainer.grace_s` is {self.grace_s}; give a number of seconds, more than 0")
        for name in ("max_seconds", "save_every_seconds", "logprob_gap_limit"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise UserError(f"`trainer.{name}` is {limit}; give more than 0, or null for none")

    def _check_retention(self) -> None:
        if self.mode not in ("min", "max"):
            raise UserError(f"`trainer.mode` is {self.mode!r}; give min or max")
        if not isinstance(self.save_last, int) or self.save_last < 2:
            raise UserError(f"`trainer.save_last` is {self.save_last!r}; give 2 or more: the last may be damaged")
        if self.save_top_k < -1:
            raise UserError(f"`trainer.save_top_k` is {self.save_top_k}; give a number of checkpoints, or -1 for all")
        if self.save_top_k > 0 and self.monitor is None:
            raise UserError(
                f"`trainer.save_top_k` is {self.save_top_k} and `trainer.monitor` is not set, so no checkpoint is"
                " better than another; name a metric"
            )
        if self.save_top_k == 0 and self.monitor is not None and self.ckpt_path != "best":
            raise UserError(
                f"`trainer.monitor` is {self.monitor!r} and `trainer.save_top_k` is 0, so the metric decides nothing;"
                " give a number of best checkpoints"
            )
        if self.ckpt_path == "best" and self.monitor is None:
            raise UserError("`trainer.ckpt_path` is 'best' and `trainer.monitor` is not set; name the metric to go by")
        if self.save_top_k and not self.saves_checkpoints:
            raise UserError(
                f"`trainer.save_top_k` is {self.save_top_k}, and no checkpoint is written; set"
                " `trainer.save_every_n_steps` or `trainer.save_every_seconds`"
            )

    @property
    def folder(self) -> Path:
        """Folder of the results: `run_dir`, or `<run_dir>-dev` of a `fast_dev_run`."""
        path = Path(self.run_dir)
        return path.with_name(f"{path.name}-dev") if self.fast_dev_run else path

    @property
    def balancing(self) -> Balance:
        """The constants of `balance`."""
        return Balance(self.balance) if isinstance(self.balance, str) else self.balance

    @property
    def saves_checkpoints(self) -> bool:
        """Whether checkpoints are written."""
        return self.save_every_n_steps is not None or self.save_every_seconds is not None

    @property
    def world_size(self) -> int:
        """Processes of the run: `devices` times `num_nodes`."""
        return self.ranks_here * self.num_nodes

    @property
    def ranks_here(self) -> int:
        """Processes on this machine: `devices`, which the constructor has made a number."""
        assert not isinstance(self.devices, str)
        return self.devices

    @property
    def cuts_off(self) -> bool:
        """Whether long responses are cut off and continued with the next draw of prompts."""
        return self.partial_rollout is not None

    def for_command(self, name: str) -> Settings:
        """Settings of `Trainer.validate` and the like: in a folder next to the run's folder, which may have the model.

        Args:
            name: Name of the command, `validate`: the folder is then `<run_dir>-validate`.
        """
        path = Path(self.run_dir)
        return replace(self, run_dir=str(path.with_name(f"{path.name}-{name}")), max_steps=1)
