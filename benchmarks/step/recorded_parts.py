"""Records the requests to rlflow's engine and the inputs of its models in a step, to repeat both alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.models.handle import ModelHandle
from rlflow.models.prefixes import Prefixes
from rlflow.rollout import Completion, Sampling, VLLMEngine
from rlflow.strategies import DeepSpeedStrategy


@dataclass
class Pass:
    """One forward pass over a packed line.

    Attributes:
        input_ids: `[1, N]`.
        position_ids: `[1, N]`.
        cu_seqlens: `[S + 1]`, where sequences of the line start, and the end; without what they share with others.
        max_seqlen: Length of the longest.
        scored: `[R]`, positions of the line that are scored.
        targets: `[R]`, the tokens after them.
        prefixes: The tokens that each sequence reads, where sequences share some; else None.
        trains: Whether a backward pass followed.
        ends_update: Whether the optimizer's step did.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    scored: Tensor
    targets: Tensor
    prefixes: Prefixes | None = None
    trains: bool = False
    ends_update: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence; a token that several share counts for the first."""
        return self.cu_seqlens.diff().tolist()

    @property
    def sequences(self) -> tuple[Tensor, ...]:
        """The places in the line of the tokens of each sequence."""
        if self.prefixes is None:
            return torch.arange(self.input_ids.numel()).split(self.lengths)
        return self.prefixes.keys.split(self.prefixes.lengths().tolist())


class RecordedStrategy(DeepSpeedStrategy):
    """Keeps the forward passes of each role since `forget`."""

    def setup_role(self, name: str, handle: ModelHandle, path: Path, updates: int | None = None) -> None:
        super().setup_role(name, handle, path, updates)
        self.forget()

        def keep(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            read = Pass(*arguments[:6], named.get("prefixes"))
            read.trains = torch.is_grad_enabled()  # a DeepSpeed engine is `training` at all times
            self.passes[name].append(read)

        assert handle._forward is not None
        handle._forward.register_forward_pre_hook(keep, with_kwargs=True)

    def backward(self, name: str, loss: Tensor, last: bool) -> None:  # type: ignore[override]
        super().backward(name, loss, last)
        self.passes[name][-1].ends_update = last

    def forget(self) -> None:
        """Begin a new step."""
        self.passes: dict[str, list[Pass]] = defaultdict(list)


class RecordedVLLM(VLLMEngine):
    """Keeps what it was last asked and answered, and answers again with nothing around vLLM."""

    def _generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.asked = prompts, seeds, sampling
        self.answered = super()._generate(prompts, seeds, sampling)
        return self.answered

    def prepare_again(self) -> Callable[[], Any]:
        """The same request, ready to be sent; no prompt is in the cache, as after a weight sync."""
        prompts, seeds, sampling = self.asked
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [
            self._sampling_params(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                seed=seed,
                ignore_eos=True,
                stop_token_ids=list(sampling.stop_token_ids),
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for seed in seeds
        ]
        assert self._llm.reset_prefix_cache()
        return lambda: self._llm.generate(requests, params, use_tqdm=False)
