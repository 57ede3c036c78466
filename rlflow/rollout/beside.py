"""An engine in a process of its own beside its rank, for jobs in which only some ranks have engines."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.reductions import reduce_tensor

from rlflow.errors import UserError
from rlflow.loggers.log_lines import line_log
from rlflow.process.listening import listening
from rlflow.rollout.beside_process import END_S, BesideProcess, EngineProcessError, EngineProcessGone
from rlflow.rollout.engine import NO_VERSION, Completion, EngineMemory, EnginePlace, RolloutEngine, Sampling, SyncReport
from rlflow.rollout.engine_process import Done, End, EngineGroup, Failed, SentWeight, Taken, Withdrawn, fingerprints
from rlflow.rollout.manifest import Piece
from rlflow.rollout.request import Turn
from rlflow.rollout.shared import share

log = line_log(__name__)
_stores: dict[str, Any] = {}  # where the processes of an engine meet, by address


class EngineBeside(RolloutEngine):
    """Does what `engine` does, in another process of the same machine.

    Weights reach it one by one by memory that both processes map: on the CPU of each tensor only the slices that this
    rank's part of the engine holds, on a GPU all of it (CUDA IPC), of which the engine takes its part.

    Every call raises what the engine raises: `UserError` and `WeightSyncError` with their text, anything else, a death
    and a timeout as `EngineProcessError`. The process ends with this one, however this one ends.

    On the CPU, and where no other rank shares the engine, a process that dies or hangs while it generates is started
    again, once for each sync: it gets the weights that it was sent last, of which this one keeps a copy, reads them
    back, and generates anew. A response depends on its prompt and seed, so it is the same.

    Args:
        engine: As constructed; it is set up in the other process and never in this one.
        index: Of this rank among those that share the engine.
        size: How many share it.
        address: From `free_address` of the first of them; unused where there is one.
        timeout_s: Bounds every wait.
    """

    def __init__(self, engine: RolloutEngine, *, index: int, size: int, address: str, timeout_s: float = 600.0) -> None:
        assert size == engine.tensor_parallel_size, (size, engine.tensor_parallel_size)
        if timeout_s <= 0:
            raise UserError(f"`timeout_s` is {timeout_s}; an engine needs time to answer. Set more than 0 seconds.")
        self.tensor_parallel_size = size
        self._engine = engine
        self._group = EngineGroup(index, size, address, timeout_s)
        self._process: BesideProcess | None = None
        self._sent: list[tuple[str, Tensor]] = []  # the last weights, where they are kept
        self._sent_version = NO_VERSION  # of them, once the engine has them all
        self._turns: dict[int, Turn] = {}  # in progress
        self._restarted = False  # since the last sync
        self._pieces: dict[str, list[Piece]] = {}

    def memory_taken(self, rows: int, row_bytes: int, on_cpu: bool) -> EngineMemory:
        return self._engine.memory_taken(rows, row_bytes, on_cpu)

    def tell_experts(self) -> None:
        self._engine.tell_experts()

    def use_float32_head(self) -> None:
        self._engine.use_float32_head()

    def memory_settings(self, on_cpu: bool) -> tuple[str, ...]:
        return self._engine.memory_settings(on_cpu)

    def setup(self, model_path: str, place: EnginePlace) -> None:
        if type(self._engine).__module__ == "__main__":
            raise UserError(
                f"`{type(self._engine).__name__}` is defined in the script that was started, which an engine's own"
                " process does not run; put the class into a module that can be imported"
            )
        self._dtype, self._device = place.dtype, place.device
        self._model_path, self._place = model_path, place
        self._start()

    def _start(self) -> None:
        model_path, place = self._model_path, self._place
        self._process = BesideProcess(place.rank, self._group, place.local_rank)
        self._process.send((self._engine, self._group), "start")
        of_engine = replace(place, rank=self._group.index, world_size=self._group.size)
        try:
            self._call("setup", "set up its engine", model_path, of_engine)
            self._pieces = {}
            for piece in self._call("pieces", "say which weights it holds"):
                self._pieces.setdefault(piece.name, []).append(piece)
        except BaseException:
            self._process.end(0.0)
            raise

    def check_context(self, prompt: int, response: int) -> None:
        self._call("check_context", "check its context", prompt, response)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, version: int
    ) -> list[Completion]:
        asked = [list(map(int, prompt)) for prompt in prompts]
        doing = f"generate {len(asked)} responses"
        completions: list[Completion]
        try:
            completions = self._call("generate", doing, asked, list(seeds), sampling, version)
        except EngineProcessGone as gone:
            self._restart(gone)
            completions = self._call("generate", doing, asked, list(seeds), sampling, version)
        return completions

    def step(self, new: Mapping[int, Turn], sampling: Sampling, version: int) -> dict[int, Completion]:
        plain = {at: replace(turn, prompt=list(map(int, turn.prompt))) for at, turn in new.items()}
        self._turns |= plain
        doing = "go on with its turns"
        ended: dict[int, Completion]
        try:
            ended = self._call("step", doing, plain, sampling, version)
        except EngineProcessGone as gone:
            self._restart(gone)
            ended = self._call("step", doing, self._turns, sampling, version)
        self._turns = {at: turn for at, turn in self._turns.items() if at not in ended}
        return ended

    def abort(self) -> None:
        self._turns.clear()
        self._call("abort", "give up its turns")

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        start = time.perf_counter()
        self._restarted = False
        self._forget()
        if not self._running().runs:  # it died after it had generated last
            log.warning("%s is gone; it is started again", self._running().name)
            self._running().end(0.0)
            self._start()
        report = self._loaded(buckets, version, keeps=self._group.size == 1 and self._device.type == "cpu")
        self._sent_version = version
        return SyncReport(report.version, report.tensors, report.nbytes, time.perf_counter() - start)

    def _forget(self) -> None:
        self._sent.clear()
        self._sent_version = NO_VERSION

    def _restart(self, gone: EngineProcessGone) -> None:
        """Start the process again, with the weights that it had.

        Raises:
            EngineProcessGone: It was restarted since the last sync, or its weights were not kept.
        """
        version = self._sent_version
        if self._restarted or version == NO_VERSION or not self._sent:
            raise gone
        self._restarted = True
        reason = str(gone).partition("\n")[0]
        log.warning("%s It is started again, with the weights of version %d.", reason, version)
        self._start()
        self._loaded([[named] for named in self._sent], version, keeps=False)

    def _loaded(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int, keeps: bool) -> SyncReport:
        """Send weights, which the engine reads back."""
        process, doing = self._running(), f"load the weights of version {version}"
        self.policy_version = NO_VERSION
        process.send(("update_weights", (version,), {}), doing)
        passing = self._kept(buckets) if keeps else buckets
        report: SyncReport = self._result(self._stream(process, passing, doing), doing)
        return report

    def _kept(self, buckets: Iterable[list[tuple[str, Tensor]]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Keep a copy of each weight that passes."""
        for bucket in buckets:
            self._sent += [(name, tensor.detach().to(self._dtype, copy=True)) for name, tensor in bucket]
            yield bucket

    def sleep(self, keep_weights: bool = False) -> None:
        if not keep_weights:
            self._forget()
        self._call("sleep", "sleep", keep_weights)

    def wake_up(self) -> None:
        if self._device.type != "cpu":  # what this process has freed its allocator keeps from the other
            torch.cuda.empty_cache()
        self._call("wake_up", "wake up")

    def close(self) -> None:
        process, self._process = self._process, None
        self.policy_version = NO_VERSION
        if process is not None and process.runs:
            with suppress(EngineProcessError):  # it is to end, and is ended
                process.send(("close", (), {}), "close")
                process.receive("close")
        if process is not None:
            process.end(END_S)
        if self._group.index == 0:
            _stores.pop(self._group.address, None)

    def _stream(self, process: BesideProcess, buckets: Iterable[list[tuple[str, Tensor]]], doing: str) -> Any:
        """Send every weight, the next copied while the engine loads the one before it; the answer to them all."""
        weights = (named for bucket in buckets for named in bucket)
        loading = False
        while True:
            try:
                weight = self._shared(weights)
            except BaseException:
                if not loading or isinstance(process.receive(doing), Taken):
                    process.send(Withdrawn(), doing)
                    process.receive(doing)
                raise
            if loading:
                answer = process.receive(doing)
                if not isinstance(answer, Taken):  # it failed, or wants no more
                    if weight is not None and weight[1] is not None:
                        os.close(weight[1])
                    return answer
            if weight is None:
                process.send(End(), doing)
                return process.receive(doing)
            process.send(weight[0], doing, descriptor=weight[1])
            loading = True

    def _shared(self, weights: Iterator[tuple[str, Tensor]]) -> tuple[SentWeight, int | None] | None:
        """The next weight in the engine's dtype, its pieces in memory that both processes map; None after the last."""
        named = next(weights, None)
        if named is None:
            return None
        name, tensor = named[0], named[1].detach().to(self._dtype)
        pieces = tuple(self._pieces.get(name, ()))
        found = fingerprints(tensor, pieces)
        if tensor.is_cuda:
            # A copy, for the engine may keep it for longer than the trainer does; its memory is freed when both let go.
            on_gpu = reduce_tensor(tensor.clone())
            return SentWeight(name, tuple(tensor.shape), self._dtype, pieces, found, on_gpu), None
        parts = [piece.sent for piece in pieces]
        return SentWeight(name, tuple(tensor.shape), self._dtype, pieces, found), share(tensor, parts)

    def _call(self, method: str, doing: str, *arguments: Any, **keywords: Any) -> Any:
        process = self._running()
        process.send((method, arguments, keywords), doing)
        return self._result(process.receive(doing), doing)

    def _result(self, answer: Any, doing: str) -> Any:
        assert isinstance(answer, Done | Failed), answer
        self.policy_version = answer.policy_version
        if isinstance(answer, Done):
            return answer.result
        if answer.kind is not None:
            raise answer.kind(answer.text)
        error = EngineProcessError(f"{self._running().name} could not {doing}: {answer.text}")
        error.add_note(answer.trace)
        raise error

    def _running(self) -> BesideProcess:
        assert self._process is not None, "the engine was not set up, or was closed"
        return self._process


def free_address() -> str:
    """Where the processes of an engine meet: `host:port` of a store in this process, the first of its ranks.

    The host is the address of this machine that reaches the job's `MASTER_ADDR`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        host = probe.getsockname()[0]
    served = listening(host, 0)
    assert served is not None, host  # an address of this machine
    port = served.getsockname()[1]
    address = f"{host}:{port}"
    _stores[address] = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=served.detach())
    return address
