"""Engine and trainer compared at each sync, where the rows of a step cannot: they are of older weights."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from rlflow.controller.gap import LogprobGap
from rlflow.dag.tasks import SyncWeights
from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.transport import Transport
from rlflow.metrics import StepMetrics
from rlflow.models.causal_lm import CausalLM
from rlflow.rollout.engine import Completion, RolloutEngine, Sampling
from rlflow.rollout.sampling import sampling_seed
from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged

PROBES = 4  # responses
TOKENS = 8  # of each, at most


class Probe:
    """After a sync the engine writes a few short responses, and the trainer says what it thinks of them.

    Args:
        task: The sync; its ranks call `run` together.
        handle: Of the policy, on the ranks that train it.
        engine: Of this rank; None without.
        transport: To the other ranks.
        gap: Records how far the two are apart.
        prompts: Token ids of the prompts to respond to, the same on every rank.
        temperature: Of the run.
        longest: The longest response of the run.
        seed: Of the run.
    """

    def __init__(
        self,
        task: SyncWeights,
        handle: CausalLM,
        engine: RolloutEngine | None,
        transport: Transport,
        gap: LogprobGap,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        longest: int,
        seed: int,
    ) -> None:
        self._task = task
        self._handle = handle
        self._engine = engine
        self._transport = transport
        self._gap = gap
        self._prompts = [list(prompts[index % len(prompts)]) for index in range(PROBES)]
        self._sampling = Sampling(min(TOKENS, longest), temperature)
        self._seed = seed

    def run(self, version: int, metrics: StepMetrics) -> None:
        """Compare at `version`, which both have now."""
        speaker, rank = self._task.target[0], self._transport.rank
        completions = [] if self._engine is None else self._sampled(self._engine, version)
        message = None
        if rank == speaker:
            written = json.dumps([[one.token_ids, one.logprobs] for one in completions]).encode()
            message = to_message(written)
        ranks = probing_group(self._task)
        if rank not in ranks:
            return
        received = from_message(self._transport.broadcast_bytes(message, speaker, ranks))
        if rank in self._task.source:
            self._compare([(tokens, logprobs) for tokens, logprobs in json.loads(received)], metrics)

    def _sampled(self, engine: RolloutEngine, version: int) -> list[Completion]:
        seeds = [sampling_seed(self._seed, version, "probe", (0,), index) for index in range(PROBES)]
        return engine.generate(self._prompts, seeds, self._sampling, version)

    def _compare(self, written: list[tuple[list[int], list[float]]], metrics: StepMetrics) -> None:
        """Every rank of the role scores all rows: they are few, and scoring is a collective."""
        device = self._transport.device
        prompts = Ragged(
            torch.tensor([token for prompt in self._prompts for token in prompt], device=device),
            torch.tensor([len(prompt) for prompt in self._prompts], device=device),
        )
        responses = Ragged(
            torch.tensor([token for tokens, _ in written for token in tokens], device=device),
            torch.tensor([len(tokens) for tokens, _ in written], device=device),
        )
        rows = TokenRows.padded(prompts, responses)
        mask = torch.arange(rows.response_ids.shape[1], device=device) < rows.lengths[:, None]
        said = torch.zeros(mask.shape, dtype=torch.float64, device=device)
        said[mask] = torch.tensor([p for _, logprobs in written for p in logprobs], dtype=said.dtype, device=device)
        self._gap.record(metrics, self._handle.logprobs(rows), said, mask)


def probing_group(task: SyncWeights) -> tuple[int, ...]:
    """The engine's first rank and the role's ranks."""
    return tuple(sorted({task.target[0], *task.source}))
