"""The interface of rollout engines: an engine holds one version of a policy's weights, checked after each sync."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.moe import ROUTER_BIAS
from rlflow.models.picture_processor import PictureProcessor
from rlflow.models.weights import fingerprint
from rlflow.values.picture import Picture
from rlflow.values.response_settings import SamplingSettings
from rlflow.values.truncation import Truncation

if TYPE_CHECKING:
    from transformers import PretrainedConfig


NO_VERSION = -1
ALL = Truncation()


@dataclass(frozen=True)
class Sampling:
    """The settings by which responses are sampled.

    `Sampling(256, 0.7, (151645,))` samples up to 256 tokens with logits divided by 0.7, and ends at token 151645.

    Attributes:
        max_tokens: Tokens of the longest response, at least 1.
        temperature: Divides the logits; 0 takes the likeliest token.
        stop_token_ids: A response ends with the first of these, which belongs to it.
        limits: The longest response to each prompt; the largest of them is `max_tokens`. None where all have that.
            Three responses that continue others of 2, 5 and 0 tokens to at most 8 have `max_tokens` 8 and the limits
            `(6, 3, 8)`.
        truncation: Limits on the tokens that are sampled from. At temperature 0 the likeliest token is taken anyway.
        of_prompts: Settings of each prompt in place of `temperature` and `truncation`, None for a prompt that has none
            of its own; None where no prompt has.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    limits: tuple[int, ...] | None = None
    truncation: Truncation = ALL
    of_prompts: tuple[SamplingSettings | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"`max_tokens` is {self.max_tokens}; a response has at least one token. Set 1 or more.")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"`temperature` is {self.temperature}; logits are divided by it. Set 0 (greedy) or more.")

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from only some of the vocabulary."""
        return bool(self.truncation) and self.temperature > 0

    def notes_support(self, most: int) -> bool:
        """Whether responses record the tokens that each token was sampled from; training samples from at most `most`.

        Validation may sample from more tokens, and nothing scores what it sampled.
        """
        kept = self.truncation.top_k
        return self.truncates and kept is not None and kept <= most

    def limits_of(self, prompts: int) -> tuple[int, ...]:
        """The longest response to each of `prompts` prompts."""
        return (self.max_tokens,) * prompts if self.limits is None else self.limits

    def each(self, prompts: int) -> tuple[Sampling, ...]:
        """The sampling of each of `prompts` prompts, without its longest response; equal objects are the same."""
        common = replace(self, limits=None, of_prompts=None)
        own = self.of_prompts or (None,) * prompts
        known = {
            of_it: common if of_it is None else replace(common, temperature=of_it.temperature, truncation=of_it)
            for of_it in own
        }
        return tuple(known[of_it] for of_it in own)


@dataclass(frozen=True)
class Completion:
    """One response.

    For the response `20 21 2`, which the end token 2 ended, sampled at temperature 0.7:

        token_ids   (20, 21, 2)
        logprobs    (-0.11, -0.24, -0.31), of the distribution after it was divided by 0.7
        finished    True

    Attributes:
        token_ids: The generated tokens, the stop token included.
        logprobs: Log-probability of each of them, in nats, after temperature, and over the tokens that it was sampled
            from; at temperature 1 and over all tokens where sampling was greedy.
        finished: Whether it ended by a stop token, and not by the longest allowed length.
        columns: Further records of the engine, by their column in a `Rollout`. A `PerToken` column has an entry for
            each generated token; a ragged one, for each token of prompt and response except the last. `support` and
            `support_logprobs` have the entries of the generated tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    columns: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class SyncReport:
    """The report of one weight sync.

    Attributes:
        version: The policy version that the engine now holds.
        tensors: Number of tensors that were sent; all of them were read back.
        nbytes: Bytes of these tensors, in the engine's dtype.
        seconds: Seconds of sending and reading back.
    """

    version: int
    tensors: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class EngineMemory:
    """The memory of a rank that an engine takes in addition to its weights.

    Attributes:
        max_num_seqs: Most responses that are generated at the same time; None for as many as the GPU's kind decides.
        share: Share of the device's memory, for weights and cache together; 0 where `cache` is given.
        cache: Bytes of keys and values on a rank; None for the share without the weights.
        asleep: Memory that stays allocated while roles are trained.
    """

    max_num_seqs: int | None
    share: float = 0.0
    cache: float | None = None
    asleep: Literal["nothing", "weights", "weights and cache"] = "nothing"


@dataclass(frozen=True)
class RankInfo:
    """The device, dtype and rank of an engine, and whether it may run a model's own code.

    Attributes:
        dtype: Dtype of weights and computation.
        device: Device of this rank.
        rank: Rank in the process group of the job; 0 where there is none.
        world_size: Size of that group; 1 where there is none.
        local_rank: Rank on this machine.
        seed: Seed of the run. What is sampled depends on the seeds given to `generate`, not on this one.
        trust_remote_code: Whether code in the folder of the model's weights may run.
    """

    dtype: torch.dtype
    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    seed: int = 0
    trust_remote_code: bool = False


class RolloutEngine(ABC):
    """Generates responses with the weights of its last weight sync.

    Calls come in this order. The constructor only stores settings. `check_installed` and the other checks are called
    before processes start. `setup` builds the engine without weights. Each step calls `wake_up`, `update_weights`, any
    number of `generate`, `completions` and `step`, and then `sleep`. `close` comes last. Derive your own engine from
    `InProcessEngine`, which stores the version and verifies each weight sync.

    Attributes:
        tensor_parallel_size: Number of ranks that share one engine. Each makes the same calls and gets the same
            responses.
        needs_all_ranks: Whether every rank of the job must build an engine if engines are in the ranks' own processes.
            If only some ranks have an engine, it is then in another process, see `EngineSubprocess`.
        policy_version: Version of the weights that it holds; `NO_VERSION` before the first sync, after `sleep`, and
            after a sync that failed.
    """

    tensor_parallel_size: int = 1
    needs_all_ranks: bool = False
    policy_version: int = NO_VERSION

    def check_installed(self) -> None:  # noqa: B027 - most need nothing that is not there
        """Check that the library that generates is installed; called before processes start.

        Raises:
            UserError: It is not installed.
        """

    def check_lengths(  # noqa: B027 - engines without limits of their own have nothing to refuse
        self, prompt: int, response: int, *, positions: int | None, token_bytes: int, on_cpu: bool
    ) -> None:
        """Check that the engine can hold the longest prompt and response; called before it is set up.

        Args:
            prompt: Tokens of the longest prompt.
            response: Tokens of the longest response.
            positions: Maximum number of tokens that the model takes, at least `prompt + response`; None for no limit.
            token_bytes: Bytes of the keys and values of a token on each rank that shares the engine.
            on_cpu: Whether the engine will run on the CPU.

        Raises:
            UserError: The engine cannot hold them; the error names the setting.
        """

    def check_pictures(self, most: int) -> None:  # noqa: B027 - most take any number
        """Check that the engine takes the pictures of each prompt; called before it is set up.

        Args:
            most: Largest number of pictures in a prompt.

        Raises:
            UserError: The engine takes fewer pictures; the error names the setting.
        """

    def check_device(self, device: torch.device) -> None:  # noqa: B027 - most run on any
        """Check that the engine runs on a device; called before processes start and weights are loaded.

        Args:
            device: Device of this rank.

        Raises:
            UserError: The engine does not run on such a device.
        """

    def check_model(self, config: PretrainedConfig) -> None:  # noqa: B027 - most take them all
        """Check that the engine can generate with a model; called before processes start.

        Args:
            config: The model's transformers configuration.

        Raises:
            UserError: The engine cannot generate with this model.
        """

    def shares_process(self, other: RolloutEngine, on_cpu: bool) -> bool:
        """Whether this engine can be in the same process as `other`; if not, it gets its own process.

        Args:
            other: An engine of another policy.
            on_cpu: Whether the engines run on the CPU.
        """
        return True

    def return_experts(self) -> None:
        """Let each response also have the experts of its tokens; called before `setup`, for a mixture of experts.

        Raises:
            UserError: The engine cannot return experts.
        """
        raise UserError(
            f"`moe.routing_replay` is set, and `rollout` is {type(self).__name__}, which does not report which"
            " experts it chose; set `rollout: rlflow.rollout.TransformersEngine`, or leave `routing_replay` out"
        )

    def return_support(self, most: int) -> None:
        """Let responses also have the columns `support` and `support_logprobs` of a `Rollout`; called before `setup`.

        Responses with `Sampling.notes_support` have them. They are sampled from at most `most` tokens at each place.

        Args:
            most: The largest `top_k` in training.

        Raises:
            UserError: The engine cannot return the column.
        """
        raise UserError(
            f"`top_p`, `top_k` or `min_p` is set, and `rollout` is {type(self).__name__}, which does not report the"
            " tokens that they leave, and a loss needs these; set `rollout: rlflow.rollout.TransformersEngine` or"
            " `VLLMEngine`, or leave them out"
        )

    def use_float32_head(self) -> None:
        """Compute logits in float32 whatever the dtype, as the trainer does; called before `setup`.

        Raises:
            UserError: The engine cannot compute them so.
        """
        raise UserError(
            f"`strategy.float32_head` is set, and `rollout` is {type(self).__name__}, which computes logits in the"
            " model's dtype; set `rollout: rlflow.rollout.TransformersEngine`, or leave `float32_head` out"
        )

    def memory_taken(self, rows: int, row_bytes: int, on_cpu: bool) -> EngineMemory:
        """An estimate of a rank's memory that the engine takes. In this class, a cache for all rows, then freed.

        Args:
            rows: Number of responses that one engine generates in a step.
            row_bytes: Bytes of the keys and values of the longest prompt and response.
            on_cpu: Whether the engine runs on the CPU.
        """
        return EngineMemory(rows, cache=rows * row_bytes, asleep="weights")

    def memory_settings(self, on_cpu: bool) -> tuple[str, ...]:
        """Advice on settings of the engine that would take less memory, with their values.

        Args:
            on_cpu: Whether the engine runs on the CPU.
        """
        return (
            "lower `data.prompts_per_step` or `module.max_response_length`, so that fewer tokens are"
            " generated at a time",
        )

    @abstractmethod
    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        """Build the engine, without any version of the policy. All ranks that share it call this together.

        Args:
            model_path: Folder or Hugging Face name.
            rank_info: Device, dtype and rank of this engine, and the run's seed.

        Raises:
            UserError: The engine cannot run this model, dtype or number of ranks.
        """

    def check_context(self, prompt: int, response: int) -> None:  # noqa: B027 - as `check_lengths`
        """Check the lengths again after `setup`, when the engine knows the memory of its cache.

        Args:
            prompt: Tokens of the longest prompt.
            response: Tokens of the longest response.

        Raises:
            UserError: The prompt and the response do not fit; the error names the settings.
        """

    def pieces(self) -> Sequence[Piece]:
        """The slices of the trainer's tensors that this rank's part of the engine holds; none if they are unknown."""
        return ()

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        version: int,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Completion]:
        """One response to each prompt, in order. A response depends only on its own prompt and seed.

        Args:
            prompts: Token ids, one list for each response. A picture has the ids of its expansion.
            seeds: Seeds, one for each prompt, see `sampling_seed`.
            sampling: Settings of sampling, for all prompts; `Sampling.each` has those of each prompt.
            version: The policy version that must generate.
            pictures: Pictures of each prompt, in the order of their places. It is not passed if no prompt has pictures,
                so an engine for text alone needs no such parameter.

        Raises:
            WeightSyncError: The engine holds another version.
            UserError: A prompt and the longest response do not fit into the engine's context, or the engine does not
                take the pictures.
        """

    def step(self, new: Mapping[int, GenerationRequest], sampling: Sampling, version: int) -> dict[int, Completion]:
        """Begin new turns in addition to those in progress, compute a step, and return the turns that ended, by number.

        An engine with continuous batching computes one step. Other engines, as this class does, compute the new turns
        to their ends.

        Args:
            new: New turns, by numbers that no turn in progress has.
            sampling: Settings of sampling, for turns that have none of their own. Each turn has its own length limit.
            version: The policy version that must generate.

        Raises:
            WeightSyncError, UserError: For the reasons of `generate`.
        """
        if not new:
            return {}
        limits, own = (tuple(each) for each in zip(*((turn.longest, turn.own) for turn in new.values()), strict=True))
        of_each = replace(sampling, max_tokens=max(limits), limits=limits, of_prompts=own)
        prompts, seeds = [turn.prompt for turn in new.values()], [turn.seed for turn in new.values()]
        pictures = [turn.pictures for turn in new.values()]
        completions = self.generate(prompts, seeds, of_each, version, **picture_argument(pictures))
        return dict(zip(new, completions, strict=True))

    def completions(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        version: int,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> Iterator[tuple[int, Completion]]:
        """The responses of `generate`, each as soon as it has ended, with the place of its prompt among the prompts.

        Arguments and errors are those of `generate`. If an engine does not override `step`, all responses end together.
        """
        limits, none = sampling.limits_of(len(prompts)), [None] * len(prompts)
        asked = zip(prompts, seeds, limits, pictures or [()] * len(prompts), sampling.of_prompts or none, strict=True)
        new = {place: GenerationRequest(*turn) for place, turn in enumerate(asked)}
        left = len(new)
        while left:
            ended = self.step(new, sampling, version)
            new = {}
            left -= len(ended)
            yield from ended.items()

    def abort(self) -> None:  # noqa: B027 - nothing is in progress between the steps of most
        """Cancel the turns in progress."""

    @abstractmethod
    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        """Load the weights of `version`, then read every tensor back and compare it with the tensor that was sent.

        Args:
            buckets: Full tensors by their Hugging Face names, a few at a time. A bucket is read when the previous one
                has been loaded. The engine may keep single tensors for longer, so do not overwrite them.
            version: The policy version of these weights.

        Raises:
            WeightSyncError: Tensors were not sent, or the engine does not hold them as sent; the error names them.
        """

    def sleep(self, keep_weights: bool = False) -> None:
        """Free the memory of weights and caches for training. To generate again, call `wake_up` and sync weights.

        Args:
            keep_weights: Keep the weights of a frozen policy: those on a GPU are moved to the CPU's memory. To generate
                again, `wake_up` is enough.
        """
        if not keep_weights:
            self.policy_version = NO_VERSION

    def wake_up(self) -> None:  # noqa: B027 - engines that keep their memory have nothing to do
        """Begin a step or a validation: allocate memory that was freed; the next sync loads weights that were.

        An engine may be awake already, and have the weights. Its responses must not depend on earlier steps, since a
        resumed run has not made these.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the engine. A process group that existed before the engine is kept."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response, asked for while others are in progress.

    The two turns of row 3 in the example of `Rollout`, if `max_response_length` is 7:

        field    first turn    second turn
        prompt   12 13 14      12 13 14 30 31 40 41 42
        seed     one number    another
        longest  7             2, since 5 of the 7 tokens are used

    Attributes:
        prompt: Token ids.
        seed: See `sampling_seed`.
        longest: Tokens of the response, at most.
        pictures: Pictures of the prompt, in the order of their places.
        own: Settings of the prompt in place of those of the step; None for those of the step.
    """

    prompt: Sequence[int]
    seed: int
    longest: int
    pictures: Sequence[Picture] = ()
    own: SamplingSettings | None = None


def picture_argument(pictures: Sequence[Sequence[Picture]]) -> dict[str, Any]:
    """The argument `pictures` of an engine's methods, left out where no prompt has any."""
    return {"pictures": pictures} if any(pictures) else {}


def check_asked(n: int, longest: int, most: int) -> None:
    """Refuse invalid requests of a node to an engine.

    Args:
        n: Responses to each row.
        longest: Tokens of a response at most.
        most: Tokens that memory is planned for.

    Raises:
        UserError: It asks for none, or for longer ones.
    """
    if longest > most:
        raise UserError(
            f"`max_new_tokens` is {longest} and `module.max_response_length` is {most}, for which memory is planned;"
            " raise the latter"
        )
    if longest < 1:
        raise UserError(f"`max_new_tokens` is {longest}; a response has at least one token, so give 1 or more")
    if n < 1:
        raise UserError(f"`n` is {n}; generate 1 response to each row or more")


NAMED = 8  # tensors listed in an error


class WeightSyncError(RuntimeError):
    """The engine does not hold the weights that it should."""


@dataclass(frozen=True)
class Piece:
    """A slice of a tensor of the trainer, and where this rank's engine holds it.

    An engine that holds queries (8 rows), keys and values (2 rows each) in one parameter `qkv` `[12, H]` has the piece
    `Piece("k_proj.weight", "qkv", 2, row=8)`. On the second of two ranks, where each holds half of the queries,
    `Piece("q_proj.weight", "qkv", 4, start=4)` is rows 4 to 7 of the trainer's tensor.

    Attributes:
        name: The trainer's (Hugging Face) name.
        place: The engine's name; one of its parameters may hold pieces of several tensors.
        length: Length of the slice.
        dim: Along which the slice is cut, of both.
        start: Start of the slice in the trainer's tensor.
        row: Row of the slice in the engine's parameter.
        decays: Whether the engine holds `-exp` of it in float32, as vLLM's Mamba layers hold `A` of `A_log`.
    """

    name: str
    place: str
    length: int
    dim: int = 0
    start: int = 0
    row: int = 0
    decays: bool = False

    def cut(self, tensor: Tensor) -> Tensor:
        """The slice of the trainer's `tensor`, a view."""
        return tensor.narrow(self.dim, self.start, self.length)

    def sent(self, tensor: Tensor) -> Tensor:
        """The value of the trainer's `tensor` that the engine must hold."""
        return -self.cut(tensor).float().exp() if self.decays else self.cut(tensor)

    def held(self, parameter: Tensor) -> Tensor:
        """The slice in the engine's `parameter`."""
        return parameter.narrow(self.dim, self.row, self.length)


def in_dtype_held(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the trainer in the dtype in which engines hold it; routers' biases are always float32.

    Experts are chosen by biases that differ by thousandths, which bfloat16 would round off. Whole numbers stay.
    """
    tensor = tensor.detach()
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float32 if name.rpartition(".")[2] == ROUTER_BIAS else dtype)


class WeightFingerprints:
    """Fingerprints of the tensors of one sync, taken while they pass by.

    Args:
        pieces: All pieces that the engine holds.
        dtype: Dtype of the engine.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype) -> None:
        self.tensors = 0
        self.nbytes = 0
        self._dtype = dtype
        self._sent: dict[Piece, Tensor] = {}
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)

    def watch(self, buckets: Iterable[list[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on in the engine's dtype, one by one.

        Raises:
            WeightSyncError: The engine has no such tensor.
        """
        for bucket in buckets:
            for name, tensor in bucket:
                if name not in self._pieces:
                    raise WeightSyncError(
                        f"the trainer sends `{name}`, which the engine does not have; take another engine for"
                        " this model"
                    )
                cast = in_dtype_held(name, tensor, self._dtype)
                for piece in self._pieces[name]:
                    self._sent[piece] = fingerprint(piece.sent(cast))
                self.tensors += 1
                self.nbytes += cast.nbytes
                yield name, cast

    def check(self, held: Iterable[tuple[Piece, Tensor]]) -> None:
        """Compare the engine's weights with those that were sent, all of them in one transfer to the host.

        Raises:
            WeightSyncError: Names every tensor that was not sent or is held with other values.
        """
        unsent = [name for name, (piece, *_) in self._pieces.items() if piece not in self._sent]
        now = {piece: fingerprint(tensor) for piece, tensor in held if piece in self._sent}
        changes = _differ([self._sent[piece] for piece in now], [*now.values()])
        changed = [f"{piece.name} (in {piece.place})" for piece, change in zip(now, changes, strict=True) if change]
        problems = [
            f"{words}: {_some(names)}" for words, names in (("not sent", unsent), ("held otherwise", changed)) if names
        ]
        if problems:
            raise WeightSyncError(
                "the engine does not hold the trainer's weights, and would sample from another policy; take another"
                f" engine, and report this as a bug. {'; '.join(problems)}"
            )


def _differ(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[bool]:
    """Whether each fingerprint differs."""
    if not left:
        return []
    one, other = (torch.stack([each.to(left[0].device) for each in side]) for side in (left, right))
    differ: list[bool] = (one != other).tolist()
    return differ


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


class InProcessEngine(RolloutEngine):
    """An engine in this process. A subclass loads, reads and uses the weights, and this class verifies them.

    `setup` of a subclass sets `_pieces` (one or more for each parameter of its model), `_dtype` and `_context`. If the
    model reads pictures, `setup` also sets `_processor`. Then `update_weights` passes the trainer's tensors to `_load`,
    and compares the pieces that `_held` returns with the tensors that were sent. `generate` checks the version of the
    weights and the lengths, and calls `_generate`.
    """

    _to_hold_more: str = "take a model of longer context"  # for a message

    # Attributes of the engine that `setup` built
    _pieces: Sequence[Piece]
    _dtype: torch.dtype
    _context: int | None  # tokens of the longest prompt and response together; None without a limit
    _processor: PictureProcessor | None = None  # None of a model that reads text alone

    def check_context(self, prompt: int, response: int) -> None:
        if self._context is not None and prompt + response > self._context:
            raise UserError(
                f"a prompt of {prompt} tokens and a response of up to {response} exceed the engine's context of"
                f" {self._context} tokens; lower `data.max_prompt_length` or `module.max_response_length`, or"
                f" {self._to_hold_more}"
            )

    def pieces(self) -> Sequence[Piece]:
        return self._pieces

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        version: int,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Completion]:
        self._check(version, prompts, sampling.limits_of(len(prompts)), pictures)
        return self._generate(prompts, seeds, sampling, **picture_argument(pictures)) if prompts else []

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        start = time.perf_counter()
        self.policy_version = NO_VERSION  # what a sync leaves behind that fails midway is not a version
        manifest = WeightFingerprints(self._pieces, self._dtype)
        self._load(manifest.watch(buckets))
        manifest.check(self._held())
        self.policy_version = version
        return SyncReport(version, manifest.tensors, manifest.nbytes, time.perf_counter() - start)

    def _check(
        self,
        version: int,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        pictures: Sequence[Sequence[Picture]],
    ) -> None:
        """Refuse weights of another version, responses that do not fit, and pictures that the engine does not read."""
        if version != self.policy_version:
            held = f"version {self.policy_version}" if self.policy_version != NO_VERSION else "no version"
            raise WeightSyncError(
                f"the engine holds {held}, and must generate with version {version}; sync the weights first"
            )
        self.check_context(*max(zip(map(len, prompts), limits, strict=True), key=sum, default=(0, 0)))
        most = max(map(len, pictures), default=0)
        if most and self._processor is None:
            raise UserError(
                f"a prompt has images ({most}), and the model reads text alone; take a model that reads images, or"
                " leave them out of the dataset"
            )
        self.check_pictures(most)
        if self._processor is None:
            return
        for prompt, shown in zip(prompts, pictures, strict=False):
            found, wanted = prompt.count(self._processor.placeholder_id), sum(map(self._processor.features, shown))
            if found < wanted:
                raise UserError(
                    f"a prompt has places for {found} features of its images, which have {wanted}; if a node"
                    " writes its prompts, let it return them without `pictures`, as `Rollout.as_prompts` does"
                )

    @abstractmethod
    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Completion]:
        """One response to each prompt, in order; there is at least one, and all of them fit.

        `pictures` is left out where no prompt has any.
        """

    @abstractmethod
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load full tensors of the engine's dtype, and drop all results of older weights."""

    @abstractmethod
    def _held(self) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece as the engine now computes with it."""
