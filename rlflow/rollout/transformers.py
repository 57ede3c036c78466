"""The reference engine: transformers' forward with its cache, on any device. Slower than vLLM, and simple.

Prompts of a batch are padded on the left. Attention does not look at padding; layers that carry a state from token to
token have it set to zero at their input, and start with a state of zeros. While prompts are computed, the tower's
features of pictures replace the embeddings of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlflow.errors import UserError
from rlflow.models.architecture import positions as positions_of
from rlflow.models.mixers import mixers_of
from rlflow.models.moe import ROUTING, Routing, expert_dtype, watch_routers
from rlflow.models.picture_processor import PictureProcessor, reads_pictures
from rlflow.models.remote_code import stored_code
from rlflow.models.weights import in_buckets, stored_buffers
from rlflow.rollout.engine import (
    Completion,
    EngineMemory,
    InProcessEngine,
    Piece,
    RankInfo,
    Sampling,
    in_dtype_held,
)
from rlflow.values.picture import Picture
from rlflow.values.truncation import NOTED, noted

if TYPE_CHECKING:
    from transformers import PretrainedConfig


COMPACT_AT = 0.75  # share of rows still running below which the finished ones are dropped


class TransformersEngine(InProcessEngine):
    """Generates in batches with transformers' forward pass, a key-value cache, and its own copy of the model.

    Each rank that generates has its own engine. The cache is freed after each batch; the weights stay in memory during
    training. A token is drawn by the inverse of the cumulative distribution from a uniform number. This number depends
    only on the response's seed and the token's place, so it does not depend on the size of batches.

    Args:
        max_batch: Number of responses that are generated at the same time. A smaller number takes less memory.
        max_prefill_tokens: Number of tokens of prompts that are computed together, padding included. If prompts have
            more tokens, they are computed in parts. A smaller number takes less memory. In a model with recurrent
            layers, a part has 2 tokens or more.
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
        self._returns_experts = False
        self._most_kept = 0  # tokens of the largest support that is noted
        self._float32_head = False

    def use_float32_head(self) -> None:
        self._float32_head = True

    def return_experts(self) -> None:
        self._returns_experts = True

    def return_support(self, most: int) -> None:
        self._most_kept = most

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

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

        with stored_code(Path(model_path), "configuration", rank_info.trust_remote_code):
            config = AutoConfig.from_pretrained(model_path, trust_remote_code=rank_info.trust_remote_code)
        # Transformers' other ways to attend leave the cap out.
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        attention = {"attn_implementation": "eager"} if capped else {}
        kind: Any = AutoModelForCausalLM
        if reads_pictures(config):
            kind = AutoModelForImageTextToText
            tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=rank_info.trust_remote_code)
            self._processor = PictureProcessor.load(Path(model_path), config, tokenizer)
        # Random weights: no version is held before the first sync.
        with (
            torch.random.fork_rng(devices=[rank_info.device] if rank_info.device.type == "cuda" else []),
            rank_info.device,
        ):
            self._model: Any = kind.from_config(
                config, dtype=rank_info.dtype, trust_remote_code=rank_info.trust_remote_code, **attention
            )
        self._model.eval()
        if self._returns_experts:
            watch_routers(self._model)
        if self._float32_head:
            head = self._model.get_output_embeddings()
            head.forward = partial(_float32_products, head)
        self._expert_dtype = expert_dtype(config)
        self._dtype = rank_info.dtype
        self._device = rank_info.device
        self._context = positions_of(config)
        self._least_part = 2 if mixers_of(self._model) else 1
        for name, buffer in stored_buffers(self._model):  # in the dtype in which it is sent
            path, _, key = name.rpartition(".")
            setattr(self._model.get_submodule(path), key, in_dtype_held(name, buffer, rank_info.dtype))
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
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        version: int,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> Iterator[tuple[int, Completion]]:
        if type(self)._generate is not TransformersEngine._generate:  # what a subclass does instead
            yield from super().completions(prompts, seeds, sampling, version, pictures)
            return
        self._check(version, prompts, sampling.limits_of(len(prompts)), pictures)
        yield from self._each(prompts, seeds, sampling, pictures)

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Completion]:
        completions = dict(self._each(prompts, seeds, sampling, pictures))
        return [completions[row] for row in range(len(prompts))]

    def _each(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Sequence[Picture]],
    ) -> Iterator[tuple[int, Completion]]:
        """The place of each response among the prompts, and the response, when it has ended."""
        limits = sampling.limits_of(len(prompts))
        by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))  # little padding in a batch
        for start in range(0, len(prompts), self.max_batch):
            rows = by_length[start : start + self.max_batch]
            own = None if sampling.of_prompts is None else tuple(sampling.of_prompts[row] for row in rows)
            of_batch = replace(sampling, limits=tuple(limits[row] for row in rows), of_prompts=own)
            seen = [pictures[row] for row in rows] if pictures else []
            batch = self._generate_batch([prompts[row] for row in rows], [seeds[row] for row in rows], of_batch, seen)
            yield from ((rows[place], completion) for place, completion in batch)

    @torch.inference_mode()
    def _generate_batch(
        self,
        prompts: list[Sequence[int]],
        seeds: list[int],
        sampling: Sampling,
        pictures: list[Sequence[Picture]],
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

        each = sampling.each(size)
        distinct = [*dict.fromkeys(each)]
        kind = torch.tensor([distinct.index(how) for how in each], device=self._device)  # [B]
        notes_support = [how.notes_support(self._most_kept) for how in each]
        rows = torch.arange(size, device=self._device)  # those still in the batch
        whole = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
        ids, mask = (  # [b, P], padded on the left so that each row ends where its response begins
            pad_sequence(rows_of, batch_first=True, padding_side="left").to(self._device)
            for rows_of in (whole, [torch.ones_like(row) for row in whole])
        )
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        features: Features | None = None
        if any(pictures):
            features = self._features(ids, mask, pictures)
            positions = self._positions(positions, prompts, pictures)
        cache: Any = None
        experts: list[list[Tensor]] = [[] for _ in prompts]  # of each row, [tokens, layers, k]
        support: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]  # of each row and step, see `noted`
        growing = set(range(size))
        for step in range(steps):
            routings = self._routings(ids)
            logits, cache = self._forward(ids, mask, positions, cache, routings, features)
            numbers = rows.tolist()
            for row, of_row in zip(numbers, _experts_of(routings, mask), strict=False):
                experts[row].append(of_row)
            chosen, of_all = _sample_each(logits, distinct, kind[rows], draws[rows, step])  # [b], [b, V]
            tokens[rows, step] = chosen
            logprobs[rows, step] = of_all.gather(-1, chosen[:, None])[:, 0]
            places = [place for place, row in enumerate(numbers) if notes_support[row]]
            if places:
                for place, entries in zip(places, noted(of_all[places], chosen[places]), strict=True):
                    support[numbers[place]].append(entries)
            stopped = torch.isin(chosen, stops) & ~finished[rows] & (step < limits[rows])
            finished[rows[stopped]] = True

            running = ~finished[rows] & (step + 1 < limits[rows])
            still = {row for row, runs in zip(numbers, running.tolist(), strict=True) if runs}
            for row in sorted(growing - still):  # this step's token is their last
                ids_of_row, logprobs_of_row = (x[row, : step + 1].tolist() for x in (tokens, logprobs))
                columns = self._columns(experts[row], len(prompts[row]) + step)
                if notes_support[row]:
                    columns |= {
                        name: torch.cat(parts).numpy()
                        for name, parts in zip(NOTED, zip(*support[row], strict=True), strict=True)
                    }
                yield row, Completion(tuple(ids_of_row), tuple(logprobs_of_row), bool(finished[row]), columns)
            growing = still
            if len(still) <= COMPACT_AT * len(rows):
                kept = running.nonzero()[:, 0]
                if not len(kept):
                    break
                cache.reorder_cache(kept)
                rows, chosen, mask, positions = rows[kept], chosen[kept], mask[kept], positions[..., kept, :]
            ids, features = chosen[:, None], None
            mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=1)
            positions = _next(positions)

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
        return [Routing() for _ in parts] if self._returns_experts else []

    def _most(self, ids: Tensor) -> int:
        """The number of new tokens of each row that one forward pass computes.

        At least 2 where layers carry a state: transformers takes a token that comes alone for one that was generated,
        and would let padding into the state.
        """
        return max(self.max_prefill_tokens // len(ids), self._least_part)

    def _forward(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: Any,
        routings: Sequence[Routing],
        features: Features | None,
    ) -> tuple[Tensor, Any]:
        """Compute `N` new tokens of each row, in parts of at most `max_prefill_tokens` tokens of all rows.

        `ids` are `[b, N]`, `positions` too or `[3, b, N]`; `mask` `[b, M]` covers the tokens in `cache` and then the
        new ones. Each of `routings` records the experts of a part. Returns the logits `[b, V]` of the last tokens, and
        transformers' cache with the new ones.
        """
        width, most = ids.shape[1], self._most(ids)
        before = mask.shape[1] - width
        for number, start in enumerate(range(0, width, most)):
            part = slice(start, start + most)
            shared = {
                "attention_mask": mask[:, : before + start + most],
                "position_ids": positions[..., part],
                "past_key_values": cache,
                **({ROUTING: routings[number]} if routings else {}),
            }
            if features is None:
                output = self._model(input_ids=ids[:, part], logits_to_keep=1, **shared)
                logits = output.logits[:, -1]
            else:
                embedded = features.embedded(self._model.get_input_embeddings()(ids[:, part]), part)
                output = self._model.get_decoder()(**embedded, **shared, use_cache=True)
                logits = self._model.get_output_embeddings()(output.last_hidden_state[:, -1])
            cache = output.past_key_values
        return logits, cache

    def _features(self, ids: Tensor, mask: Tensor, pictures: Sequence[Sequence[Picture]]) -> Features:
        """The tower's features of the pictures of `b` prompts `[b, P]`; a shared picture is computed once."""
        assert self._processor is not None
        distinct = list(dict.fromkeys(chain.from_iterable(pictures)))
        values, deep, starts = list[Tensor](), list[list[Tensor]](), dict[Picture, int]()
        for some in in_buckets(distinct, self._processor.patches, self.max_prefill_tokens):
            inputs = {name: tensor.to(self._device) for name, tensor in self._processor.inputs(some).items()}
            output = self._model.get_image_features(**inputs, return_dict=True)
            values.append(_joined(output.pooler_output))
            deep.append([_joined(layer) for layer in getattr(output, "deepstack_features", None) or ()])
        start = 0
        for picture in distinct:
            starts[picture], start = start, start + self._processor.features(picture)
        places = torch.full_like(ids, -1)
        for row, of_row in enumerate(pictures):
            read = [starts[each] + at for each in of_row for at in range(self._processor.features(each))]
            # Responses come behind: a placeholder that was sampled is none of the first.
            there = ((ids[row] == self._processor.placeholder_id) & (mask[row] == 1)).nonzero()[: len(read), 0]
            assert len(there) == len(read), "the images are those of the ids"
            places[row, there] = torch.tensor(read, dtype=torch.int64, device=places.device)
        return Features(torch.cat(values), [torch.cat(layer) for layer in zip(*deep, strict=True)], places)

    def _positions(
        self, along: Tensor, prompts: Sequence[Sequence[int]], pictures: Sequence[Sequence[Picture]]
    ) -> Tensor:
        """Positions `[3, b, P]` of padded prompts where a model has them in three dimensions, else `along` `[b, P]`."""
        assert self._processor is not None
        if not self._processor.has_grid_positions:
            return along
        positions = along.repeat(3, 1, 1)
        for row, (prompt, of_row) in enumerate(zip(prompts, pictures, strict=True)):
            positions[:, row, along.shape[1] - len(prompt) :] = self._processor.positions(prompt, of_row).to(along)
        return positions


@dataclass(frozen=True)
class Features:
    """A tower's features of the pictures of a batch of prompts.

    Attributes:
        values: `[F, H]`, read in place of embeddings.
        deep: `[F, H]` for each of the decoder's first layers, added behind it; empty of most families.
        places: `[b, P]` int64, which of the `F` is read at each token; -1 where the token's own embedding is.
    """

    values: Tensor
    deep: list[Tensor]
    places: Tensor

    def embedded(self, embeddings: Tensor, part: slice) -> dict[str, Any]:
        """The decoder's input for a part of the tokens, given their own embeddings `[b, n, H]`."""
        places = self.places[:, part]
        there = places >= 0
        read = places[there]
        embeddings = embeddings.clone()
        embeddings[there] = self.values[read].to(embeddings.dtype)
        if not self.deep:
            return {"inputs_embeds": embeddings}
        deep = [layer[read] for layer in self.deep]
        return {"inputs_embeds": embeddings, "visual_pos_masks": there, "deepstack_visual_embeds": deep}


def _joined(features: Any) -> Tensor:
    """Features of some pictures, `[F, H]`; transformers gives them picture by picture, or by squares of one size."""
    return torch.cat(features) if isinstance(features, tuple) else features.flatten(0, 1)


def _next(positions: Tensor) -> Tensor:
    """Positions `[b, 1]` or `[3, b, 1]` of the next token: one more than the largest of the row."""
    largest = positions.amax(-1, keepdim=True)
    return (largest if largest.dim() == 2 else largest.amax(0, keepdim=True).expand_as(largest)) + 1


# Settings of configurations that give the projection before a convolution a bias, by type of model.
PROJECTION_BIASES = {
    "falcon_h1": "mamba_proj_bias",
    "granitemoehybrid": "mamba_proj_bias",
    "lfm2": "conv_bias",
    "nemotron_h": "use_bias",
}


def padding_in_states(config: Any) -> str | None:
    """The setting that makes padding on the left nonzero where a model's convolutions read it; None if there is none.

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


def _sample_each(logits: Tensor, settings: Sequence[Sampling], kind: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Like `_sample`, with the settings of each row chosen by `kind` `[B]`."""
    if len(settings) == 1:
        return _sample(logits, settings[0], draws)
    chosen, logprobs = torch.empty_like(kind), torch.empty_like(logits, dtype=torch.float32)
    for number, sampling in enumerate(settings):
        rows = (kind == number).nonzero()[:, 0]
        chosen[rows], logprobs[rows] = _sample(logits[rows], sampling, draws[rows])
    return chosen, logprobs


def _sample(logits: Tensor, sampling: Sampling, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids `[B]`, and the logprobs `[B, V]` of all tokens as in a `Completion`, -inf of those that are cut off.

    `logits` are `[B, V]`, and `draws` `[B]` float64 uniform in [0, 1). With the probabilities 0.2, 0.5, 0.3 the draw
    0.1 takes token 0, 0.6 token 1, and 0.9 token 2.
    """
    logits = logits.float() / (sampling.temperature or 1.0)
    if sampling.truncates:
        logits = logits.masked_fill(~sampling.truncation.kept(logits), -torch.inf)
    logprobs = torch.log_softmax(logits, dim=-1)
    if sampling.temperature == 0:
        chosen = logprobs.argmax(-1)
    else:
        # The first token at which the cumulative probability passes the draw: never one of probability 0.
        cumulative = logprobs.double().exp().cumsum(-1)
        chosen = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return chosen, logprobs


def _draws(seeds: Sequence[int], count: int) -> Tensor:
    """`[B, count]` float64 uniform in [0, 1): a row depends on its seed alone, on every device."""
    generator = torch.Generator()
    rows = [torch.rand(count, generator=generator.manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)
