"""The reference engine: transformers' forward with its cache, on any device. Slower than vLLM, and simple.

Prompts of a batch are padded on the left. Attention does not look at padding; layers that carry a state from token to
token have it set to zero at their input, and start with a state of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlflow.errors import UserError
from rlflow.models.architecture import positions as positions_of
from rlflow.models.mixers import mixers_of
from rlflow.models.moe import ROUTING, Routing, expert_dtype, watch_routers
from rlflow.models.remote_code import code_beside
from rlflow.models.weights import stored_buffers
from rlflow.rollout.engine import (
    Completion,
    EngineMemory,
    EnginePlace,
    InProcessEngine,
    Piece,
    Sampling,
    in_dtype_held,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


COMPACT_AT = 0.75  # share of rows still running below which the finished ones are dropped


class TransformersEngine(InProcessEngine):
    """Generates with transformers' forward pass and a key-value cache, in batches, with a copy of the model of its own.

    Each rank that generates has an engine of its own. The cache lives for one batch; the weights stay in memory while
    training runs. A token is drawn by the inverse of the cumulative distribution, from a uniform number that depends on
    the response's seed and the token's place alone, so that batches of other sizes draw from the same numbers.

    Args:
        max_batch: Responses generated at the same time. Smaller takes less memory.
        max_prefill_tokens: Tokens of prompts computed together, padding included; longer prompts, and more of them, are
            computed in parts. Smaller takes less memory. Where layers carry a state, a part has 2 tokens or more.
    """

    def __init__(self, max_batch: int = 256, max_prefill_tokens: int = 16384) -> None:
        if max_batch < 1:
            raise UserError(f"`max_batch` is {max_batch}; responses are generated in batches. Set 1 or more.")
        if max_prefill_tokens < max_batch:
            raise UserError(
                f"`max_prefill_tokens` is {max_prefill_tokens}, and as many as `max_batch`, {max_batch}, prompts are"
                " computed together; raise the one or lower the other"
            )
        self.max_batch = max_batch
        self.max_prefill_tokens = max_prefill_tokens
        self._tells_experts = False
        self._float32_head = False

    def use_float32_head(self) -> None:
        self._float32_head = True

    def tell_experts(self) -> None:
        self._tells_experts = True

    def memory_taken(self, rows: int, row_bytes: int, on_cpu: bool) -> EngineMemory:
        return super().memory_taken(min(rows, self.max_batch), row_bytes, on_cpu)

    def memory_settings(self, on_cpu: bool) -> tuple[str, ...]:
        return (f"lower `rollout.init_args.max_batch` ({self.max_batch})",)

    def check_model(self, config: PretrainedConfig) -> None:
        if biased := padding_in_states(config):
            raise UserError(
                f"`rollout` is {type(self).__name__}, and the model, of the type {config.model_type!r}, has a bias at"
                f" the input of its convolutions (`{biased}`): padding of shorter prompts would become part of their"
                " states; set `rollout: rlflow.rollout.VLLMEngine`, or take a model without this bias"
            )

    def setup(self, model_path: str, place: EnginePlace) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with code_beside(Path(model_path), "configuration", place.trust_remote_code):
            config = AutoConfig.from_pretrained(model_path, trust_remote_code=place.trust_remote_code)
        # Transformers' other ways to attend leave the cap out.
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        attention = {"attn_implementation": "eager"} if capped else {}
        # Random weights: no version is held before the first sync.
        with torch.random.fork_rng(devices=[place.device] if place.device.type == "cuda" else []), place.device:
            self._model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=place.dtype, trust_remote_code=place.trust_remote_code, **attention
            )
        self._model.eval()
        if self._tells_experts:
            watch_routers(self._model)
        if self._float32_head:
            head = self._model.get_output_embeddings()
            head.forward = partial(_float32_products, head)
        self._expert_dtype = expert_dtype(config)
        self._dtype = place.dtype
        self._device = place.device
        self._context = positions_of(config)
        self._least_part = 2 if mixers_of(self._model) else 1
        for name, buffer in stored_buffers(self._model):  # in the dtype in which it is sent
            path, _, key = name.rpartition(".")
            setattr(self._model.get_submodule(path), key, in_dtype_held(name, buffer, place.dtype))
        self._weights = dict([*self._model.named_parameters(), *stored_buffers(self._model)])
        self._pieces = [Piece(name, name, len(value)) for name, value in self._weights.items()]

    def close(self) -> None:
        del self._model, self._weights

    @torch.no_grad()
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, value in weights:
            self._weights[name].copy_(value)

    def _held(self) -> Iterator[tuple[Piece, Tensor]]:
        for piece in self._pieces:
            yield piece, in_dtype_held(piece.name, self._weights[piece.place], self._dtype)

    def completions(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, version: int
    ) -> Iterator[tuple[int, Completion]]:
        if type(self)._generate is not TransformersEngine._generate:  # what a subclass does instead
            yield from super().completions(prompts, seeds, sampling, version)
            return
        self._check(version, prompts, sampling.limits_of(len(prompts)))
        yield from self._each(prompts, seeds, sampling)

    def _generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        completions = dict(self._each(prompts, seeds, sampling))
        return [completions[row] for row in range(len(prompts))]

    def _each(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """The place of each response among the prompts, and the response, when it has ended."""
        limits = sampling.limits_of(len(prompts))
        by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))  # little padding in a batch
        for start in range(0, len(prompts), self.max_batch):
            rows = by_length[start : start + self.max_batch]
            of_batch = replace(sampling, limits=tuple(limits[row] for row in rows))
            batch = self._generate_batch([prompts[row] for row in rows], [seeds[row] for row in rows], of_batch)
            yield from ((rows[place], completion) for place, completion in batch)

    @torch.inference_mode()
    def _generate_batch(
        self, prompts: list[Sequence[int]], seeds: list[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """Generate one response to each of `B` prompts, a token of each in every step; yield each when it has ended.

        Responses that have ended stay in the batch until at most 3 in 4 of its rows still grow; then they are dropped.
        """
        size, limits = len(prompts), torch.tensor(sampling.limits_of(len(prompts)), device=self._device)
        steps = max(sampling.limits_of(size))
        draws = _draws(seeds, steps).to(self._device)  # [B, T]
        stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self._device)
        tokens = torch.zeros(size, steps, dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(size, steps, device=self._device)
        finished = torch.zeros(size, dtype=torch.bool, device=self._device)

        rows = torch.arange(size, device=self._device)  # those still in the batch
        ids, mask = (x.to(self._device) for x in _left_padded(prompts))  # [b, P]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache: Any = None
        experts: list[list[Tensor]] = [[] for _ in prompts]  # of each row, [tokens, layers, k]
        growing = set(range(size))
        for step in range(steps):
            routings = self._routings(ids)
            output = self._forward(ids, mask, positions, cache, routings)
            numbers = rows.tolist()
            for row, of_row in zip(numbers, _experts_of(routings, mask), strict=False):
                experts[row].append(of_row)
            cache = output.past_key_values
            chosen, chosen_logprobs = _sample(output.logits[:, -1], sampling.temperature, draws[rows, step])  # [b]
            tokens[rows, step] = chosen
            logprobs[rows, step] = chosen_logprobs
            stopped = torch.isin(chosen, stops) & ~finished[rows] & (step < limits[rows])
            finished[rows[stopped]] = True

            running = ~finished[rows] & (step + 1 < limits[rows])
            still = {row for row, runs in zip(numbers, running.tolist(), strict=True) if runs}
            for row in sorted(growing - still):  # this step's token is their last
                ids_of_row, logprobs_of_row = (x[row, : step + 1].tolist() for x in (tokens, logprobs))
                columns = self._columns(experts[row], len(prompts[row]) + step)
                yield row, Completion(tuple(ids_of_row), tuple(logprobs_of_row), bool(finished[row]), columns)
            growing = still
            if len(still) <= COMPACT_AT * len(rows):
                kept = running.nonzero()[:, 0]
                if not len(kept):
                    break
                cache.reorder_cache(kept)
                rows, chosen, mask, positions = rows[kept], chosen[kept], mask[kept], positions[kept]
            ids = chosen[:, None]
            mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=1)
            positions = positions[:, -1:] + 1

    def _columns(self, chosen: Sequence[Tensor], tokens: int) -> dict[str, np.ndarray[Any, Any]]:
        """The experts of a row's first `tokens` tokens, `[tokens, layers, k]`; later ones came after its end."""
        if not chosen:
            return {}
        experts = torch.cat(list(chosen))[:tokens]
        assert len(experts) == tokens, (len(experts), tokens)
        return {"experts": experts.to("cpu", self._expert_dtype).numpy()}

    def _routings(self, ids: Tensor) -> list[Routing]:
        """A `Routing` for each part in which the new tokens are computed; empty where experts are not recorded."""
        parts = range(0, ids.shape[1], self._most(ids))
        return [Routing() for _ in parts] if self._tells_experts else []

    def _most(self, ids: Tensor) -> int:
        """How many new tokens of each row one forward pass computes.

        At least 2 where layers carry a state: transformers takes a token that comes alone for one that was generated,
        and would let padding into the state.
        """
        return max(self.max_prefill_tokens // len(ids), self._least_part)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, routings: Sequence[Routing]) -> Any:
        """Compute `N` new tokens of each row, in parts of at most `max_prefill_tokens` tokens of all rows.

        `ids` and `positions` are `[b, N]`; `mask` `[b, M]` covers the tokens in `cache` and then the new ones. Each of
        `routings` records the experts of a part. Returns transformers' output for the last part: `logits` `[b, 1, V]`,
        and the new cache as `past_key_values`.
        """
        width, most = ids.shape[1], self._most(ids)
        before = mask.shape[1] - width
        for number, start in enumerate(range(0, width, most)):
            part = slice(start, start + most)
            watched = {ROUTING: routings[number]} if routings else {}
            output = self._model(
                input_ids=ids[:, part],
                attention_mask=mask[:, : before + start + most],
                position_ids=positions[:, part],
                past_key_values=cache,
                logits_to_keep=1,
                **watched,
            )
            cache = output.past_key_values
        return output


# Settings of configurations that give the projection before a convolution a bias, by type of model.
PROJECTION_BIASES = {
    "falcon_h1": "mamba_proj_bias",
    "granitemoehybrid": "mamba_proj_bias",
    "lfm2": "conv_bias",
    "nemotron_h": "use_bias",
}


def padding_in_states(config: Any) -> str | None:
    """The setting by which padding on the left would not be zero where a model's convolutions read it; None if it is.

    Args:
        config: A transformers configuration.
    """
    setting = PROJECTION_BIASES.get(config.model_type)
    return setting if setting and getattr(config, setting, False) else None


def _float32_products(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Logits `[..., V]` of hidden states `[..., H]`, multiplied with the head's weight in float32 or wider."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return nn.functional.linear(hidden.to(dtype), head.weight.to(dtype))


def _experts_of(routings: Sequence[Routing], mask: Tensor) -> list[Tensor]:
    """The experts of each row's new tokens, `[tokens, layers, k]` without padding; none if no routing was watched."""
    if not routings:
        return []
    of_parts = [routing.own.unflatten(0, (len(mask), -1)) for routing in routings]  # [b, n, layers, k]
    new = torch.cat(of_parts, dim=1)
    return [of_row[there] for of_row, there in zip(new, mask[:, -new.shape[1] :].bool(), strict=True)]


def _sample(logits: Tensor, temperature: float, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids `[B]` and their logprobs `[B]`, in nats after temperature; at temperature 0 those of temperature 1.

    `logits` are `[B, V]`, and `draws` `[B]` float64 uniform in [0, 1). With the probabilities 0.2, 0.5, 0.3 the draw
    0.1 takes token 0, 0.6 token 1, and 0.9 token 2.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        chosen = logprobs.argmax(-1)
    else:
        # The first token at which the cumulative probability passes the draw: never one of probability 0.
        cumulative = logprobs.double().exp().cumsum(-1)
        chosen = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]


def _draws(seeds: Sequence[int], count: int) -> Tensor:
    """`[B, count]` float64 uniform in [0, 1): a row depends on its seed alone, on every device."""
    generator = torch.Generator()
    rows = [torch.rand(count, generator=generator.manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and mask `[B, P]` int64, padded on the left so that each row ends where its response begins.

    The prompts `10 11 12` and `13` are

        ids     10 11 12    mask    1 1 1
                 0  0 13            0 0 1
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask
