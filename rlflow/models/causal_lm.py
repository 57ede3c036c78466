"""`CausalLM`, the handle of a language model; handles of its averages and base model; and the module they load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlflow.errors import UserError
from rlflow.functional import Aggregation
from rlflow.models.handle import ModelHandle
from rlflow.models.logprobs import Softmax, logprobs_of_tokens, token_kl, token_logprobs
from rlflow.models.lora import adapters_off
from rlflow.models.moe import MoE, Routing, load_balancing_loss, routers, watch_routers
from rlflow.models.packed import PackedModel
from rlflow.models.packing import PICTURES, ModelInput, columns_of, response_mask, supports, tokens_alone
from rlflow.models.weights import in_buckets
from rlflow.values.batch import TokenRows
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.host_copy import on_host, rows_at
from rlflow.values.protocols import Tokens
from rlflow.values.ragged import Ragged
from rlflow.values.response_settings import require_temperature
from rlflow.values.truncation import SUPPORT, TEMPERATURE, Truncation


@dataclass(eq=False, repr=False)
class CausalLM(ModelHandle):
    """A language model of an algorithm: `CausalLM("Qwen/Qwen2.5-1.5B")`. Constructing it loads nothing.

    Every method that scores is a collective: all ranks of the role must call it, even ranks that have no rows.

    Args:
        model: A folder in Hugging Face form, of a run or of a checkpoint, a Hugging Face name, or `tiny`.
        trainable: Whether the model is trained. A frozen model has no optimizer and no gradients.
        optimizer: Optimizer of the model; a trainable model without this argument has `Optimizer()`.
        temperature: Temperature of sampling, in validation too. All logits are divided by it before they are scored.
            A dataset of a mixture may set another one for its rows, see `MixedDataset`.
        top_p: Sample from the smallest set of likeliest tokens with at least this total probability, in validation too;
            1 for all tokens. Rows are scored over the tokens from which they were sampled, see `Truncation`.
        top_k: Sample from this number of likeliest tokens; None for no limit. A policy that is trained needs it with
            `top_p` or `min_p`: it bounds the tokens that are stored for each sampled token, at 8 bytes each.
        min_p: Sample from tokens with at least this share of the likeliest token's probability; 0 for all tokens.
        epochs: Number of passes of each step over its rows.
        samples_per_update: Number of rows of one optimizer update, over all ranks. If `loss_aggregation` is
            `episode-mean`, it counts episodes. None for one update with all rows of the step.
        start_step: The first step that trains the model, counted from 0. Earlier steps skip its train nodes.
        gradient_checkpointing: Compute activations again in the backward pass, which saves memory and takes time.
        lora: Settings of adapters, which are trained instead of the model's weights.
        moe: Settings for training the routers and experts of a mixture of experts; None to train them like all weights.
        freeze_vision_tower: In a model that reads images, do not train the vision tower and the layers between it
            and the decoder. LoRA adapts only the decoder.
        vision_tower_lr: Learning rate of the vision tower and these layers, in place of `optimizer.lr`. Warm-up and
            schedule are the same. None for `optimizer.lr`.
        trust_remote_code: Run the code in the folder of the model's weights (`auto_map`) to load it; read it first.

    Attributes:
        watch: Called with the rows and the log-probabilities `[B, T]` of all responses that are scored.
        reads_support: Whether rows of the run may have been sampled from a part of the vocabulary; set before the run.
        reads_temperature: Whether rows of the run may have a temperature of their own; set before the run.
    """

    loss_aggregation: Aggregation | None = field(default=None, init=False)  # None: a CausalLM has that of the module
    temperature: float = 1.0
    _: KW_ONLY
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    moe: MoE | None = None

    def __post_init__(self) -> None:
        require_temperature(self.temperature)
        super().__post_init__()
        if self.moe is not None and not self.trainable:
            raise UserError(f"`moe` is given for {self.model!r}, which is frozen; set `trainable` or leave it out")
        Truncation(self.top_p, self.top_k, self.min_p)  # refuses impossible settings
        self.watch: Callable[[Tokens, Tensor], None] = _ignore
        self.reads_support = self.reads_temperature = False
        self._generator: Callable[..., Any] | None = None
        self._converser: Callable[..., Any] | None = None
        self._routed: list[tuple[Routing, ModelInput]] = []  # training forwards not yet taken by `take_routed`

    def generate(
        self,
        rows: Any,
        n: int = 1,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[int] = (),
    ) -> Any:
        """Sample `n` responses to each row with this model's weights, in a node that is marked `generates=` its name.

        The model may be trained or frozen. A node may call this method several times, on rows that it reads or on rows
        that it makes from them. A second call on the same rows gives other responses.

        Rows of a `Rollout` are continued: the model reads prompt and response, and the response grows. A response that
        has ended is not continued: its only child is its copy. Inherited tokens keep ids, log-probabilities and
        versions. Several rows that a node returns may inherit the same tokens. Only the first of these rows has the
        tokens in its `loss_mask`, so each token is trained once.

        Args:
            rows: Prompts, `B` rows: `batch`, or what `Rollout.as_prompts` returns. Or responses: a `Rollout` that this
                model wrote, some rows of one, or what `Rollout.cut` returns.
            n: Number of responses to each row, or of its continuations; they are consecutive rows.
            temperature: Temperature of this call; None for the dataset's or the model's, 0 for greedy decoding.
            max_new_tokens: Maximum number of tokens that this call adds to a response. The module's
                `max_response_length` holds in any case, and is the only limit if this is None.
            stop: Ids of more tokens that end a response. The model's end tokens and the module's `stop_token_ids`
                always end it.

        Returns:
            A `Rollout` of `B * n` rows, whose parents are `rows`. It has fewer rows if some of `rows` have ended.

        Raises:
            UserError: No run is in progress, the node does not name this model, or `rows` are not rows of the step.
        """
        if self._generator is None:
            raise UserError(
                f"{self.model!r} generates in nodes that `Trainer.fit` runs, and there is no step in progress here;"
                " call `generate` in a node"
            )
        return self._generator(rows, n, temperature, max_new_tokens, tuple(stop))

    def converse(
        self,
        rows: Any,
        environment: Any,
        n: int = 1,
        *,
        players: Mapping[str, CausalLM] = MappingProxyType({}),
        temperature: float | None = None,
        stop: Sequence[int] = (),
    ) -> Any:
        """Hold `n` conversations of this model with an environment from each row; the node is marked as for `generate`.

        A response is then everything after the prompt, turn after turn, at most `max_response_length` tokens long. It
        includes the environment's tokens, which are False in `loss_mask`. Tokens that the model sampled are never
        tokenised again.

        Args:
            rows: Prompts of the dataset, `B` rows. A conversation begins with the messages of its prompt, what the
                environment adds, and the tools in the form of the model's chat template.
            environment: An `rlflow.Environment`.
            n: Number of conversations from each row; they are consecutive rows.
            players: Other models of the module, trained or frozen: by the name of a seat, the model that plays the
                seat; with a harness, by a name that the agent calls, the model that answers. The node's mark names
                these models in addition to this one. This model plays all other seats.
            temperature: Temperature of this call; None for the model's own, 0 for greedy decoding.
            stop: Ids of more tokens that end a turn. The model's end tokens and the module's `stop_token_ids` always
                end it.

        Returns:
            A `Rollout` of `B * n` rows, with `turn`, `returns` and `ended`. If the environment has seats, a
            conversation has one row for each seat that this model plays, in consecutive rows. Such a row has the tokens
            that its seat read and wrote. The texts of other seats are among the tokens that it read.

        Raises:
            UserError: See `generate`; or the environment failed, and its `on_failure` is `raise`.
        """
        if self._converser is None:
            raise UserError(
                f"{self.model!r} converses in nodes that `Trainer.fit` runs, and there is no step in progress here;"
                " call `converse` in a node"
            )
        return self._converser(rows, environment, n, temperature, tuple(stop), players)

    @property
    def truncation(self) -> Truncation:
        """The tokens that the model samples from."""
        return Truncation(self.top_p, self.top_k, self.min_p)

    @property
    def trains_on_support(self) -> bool:
        """Whether its rows need the column `support`, because a loss scores them over some of the vocabulary."""
        return bool(self.truncation) and self.trainable

    def notes_own_support(self, with_datasets: bool) -> bool:
        """Whether its own settings' support is stored: if it is trained on it, or if datasets need the column."""
        return self.trains_on_support or (with_datasets and self.top_k is not None)

    def score(self, rows: Tokens) -> tuple[PerToken, PerToken]:
        """Log-probability of each response token, and entropy of the model's distribution at the token's place.

        Both are over the tokens of `rows.support` if the rows have it, and else over the whole vocabulary.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.

        Returns:
            `[B, T]` each, in float32 (float64 where the model is), 0 where padded.
        """

        def score(own: Tokens, _: object) -> tuple[ModelInput, tuple[Tensor, ...]]:
            support = supports(own)
            readout = () if support is None else (over_support, support)
            return self._forward_pass(own, self._temperature_of(own), *readout)

        logprobs, entropy = self._by_micro_batch(rows, score)
        self.watch(rows, logprobs)
        return logprobs, entropy

    def score_support(self, rows: Tokens) -> tuple[PerToken, PerToken, Tensor]:
        """Like `score`, with the log-probability of each token from which a response token was sampled.

        Args:
            rows: See `score`.

        Returns:
            `[B, T]` and `[B, T]` as `score`; and `[B, T, K]`, in the order of `Rollout.sampler_logprobs`. Values have
            no meaning where `sampler_logprobs` is `-inf`.
        """
        every = supports(rows)
        width = 0 if every is None else every.shape[1]

        def score(own: Tokens, _: object) -> tuple[ModelInput, tuple[Tensor, ...]]:
            read, values = self._forward_pass(own, self._temperature_of(own), of_support, supports(own))
            logprobs, entropy, of_each = values
            return read, (logprobs, entropy, nn.functional.pad(of_each, (0, width - of_each.shape[1])))

        logprobs, entropy, of_each = self._by_micro_batch(rows, score)
        self.watch(rows, logprobs)
        return logprobs, entropy, of_each

    def logprobs(self, rows: Tokens) -> PerToken:
        """The log-probabilities of `score`, `[B, T]`."""
        return self.score(rows)[0]

    def entropy(self, rows: Tokens) -> PerToken:
        """The entropies of `score`, `[B, T]`."""
        return self.score(rows)[1]

    def logprobs_of(self, rows: Tokens, ids: Tensor) -> Tensor:
        """Log-probabilities of given tokens at the place of each response token.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.
            ids: `[B, T, K]` int64, tokens of the vocabulary; entries where responses are padded are not read.

        Returns:
            `[B, T, K]`, in float32 (float64 where the model is), 0 where padded.
        """
        if ids.dim() != 3 or ids.shape[:2] != rows.response_ids.shape:
            raise UserError(
                f"`logprobs_of` was given tokens {list(ids.shape)} for responses {list(rows.response_ids.shape)}; give"
                " K tokens for each response token, [B, T, K]"
            )
        return self._of_tokens(rows, 0, ids)[0]

    def topk(self, rows: Tokens, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens at the place of each response token, the likeliest first.

        Args:
            rows: See `logprobs_of`.
            k: Number from 1 to the size of the vocabulary.

        Returns:
            `[B, T, k]` log-probabilities, with gradients within training, and `[B, T, k]` int64 tokens; 0 where padded.
        """
        if k < 1:
            raise UserError(f"`topk` was asked for {k} tokens; ask for 1 or more")
        logprobs, tokens = self._of_tokens(rows, k)
        return logprobs, tokens

    def hidden(self, rows: Tokens) -> PerSample:
        """The input of the output layer at the last token of each row, or of its prompt if it has no response.

        Args:
            rows: See `logprobs_of`.

        Returns:
            `[B, H]` in float32 (float64 where the model is).
        """
        (states_there,) = self._scores(rows, self.temperature, states, at_end=True)
        return states_there[:, 0]

    def kl(
        self,
        rows: Tokens,
        other: CausalLM,
        given: Ragged | None = None,
        over: Literal["self", "other"] = "self",
    ) -> PerToken:
        """The Kullback-Leibler divergence from a frozen model, over the whole vocabulary, at each response token.

        By default it is KL(self || other), the sum of p log(p / q), where p is this model's distribution and q is the
        distribution of `other`. If this model is the student, distillation calls this reverse KL (MiniLLM, arXiv
        2306.08543; GKD, arXiv 2306.13649). The logits of each model are divided by the model's own temperature, or by
        the temperature that a row's dataset sets. In a train node, name `other` in the mark's `uses`, and read `given`
        as a separate value, `Ragged`.

        Args:
            rows: See `logprobs_of`.
            other: A frozen model of the same vocabulary on the same ranks; no gradient goes to it.
            given: Prompts that `other` reads before the same responses, one for each row; None for those of `rows`.
            over: The model whose probabilities weight the sum. `other` gives forward KL, KL(other || self).

        Returns:
            `[B, T]` in nats, in float32 (float64 where the model is), 0 where padded.

        Raises:
            UserError: `other` is trained or has another vocabulary, or `given` has another number of rows.
        """
        _refuse_support(rows, "kl")
        self._check_kl(rows, other, given, over)
        layer: list[tuple[Tensor, Softmax]] = []  # the weight of the other's output layer, and its softmax at 1.0

        def keep(hidden: Tensor, weight: Tensor, _: Tensor, softmax: Softmax) -> tuple[Tensor, ...]:
            layer[:] = [(weight.detach().clone() if other.plan.gathers else weight.detach(), softmax)]
            return (hidden,)

        def compare(
            hidden: Tensor,
            weight: Tensor,
            targets: Tensor,
            softmax: Softmax,
            theirs: Tensor,
            temperature: float | Tensor,
        ) -> tuple[Tensor, ...]:
            ((other_weight, other_softmax),) = layer
            other_softmax = replace(other_softmax, temperature=temperature)
            if len(weight) != len(other_weight):
                raise UserError(
                    f"`kl` compares models with output layers of {len(weight)} and {len(other_weight)} tokens, and a"
                    " token of one has to be a token of the other; give models of one vocabulary"
                )
            of_other = theirs, other_weight, other_softmax
            return token_kl(hidden, weight, targets, softmax, *of_other, over == "other")

        def both_passes(own: Tokens, prompts: Ragged | None) -> tuple[ModelInput, tuple[Tensor, ...]]:
            with torch.no_grad():
                # Nodes wrote other prompts, which have no pictures.
                read = tokens_alone(own) if prompts is None else TokenRows(prompts, own.response_ids, own.lengths)
                other._check_pictures(read)
                _, (theirs,) = other._forward_pass(read, 1.0, keep)
            temperatures = self._temperature_of(own), other._temperature_of(own)
            return self._forward_pass(own, temperatures[0], compare, theirs, temperatures[1])

        kl, logprobs = self._by_micro_batch(rows, both_passes, given)
        self.watch(rows, logprobs)
        return kl

    def _temperature_of(self, rows: Tokens) -> float | Tensor:
        """The temperature of each row: the one that its dataset sets, or else the model's.

        Returns:
            `[R]` float64, for each response token; a number if no dataset of the run sets one.
        """
        own = columns_of(rows).get(TEMPERATURE) if self.reads_temperature else None
        if not isinstance(own, Tensor):
            return self.temperature
        tokens = int(on_host(rows.lengths).sum())
        # On the device of the rows: the host has no copy, and does not wait for one.
        of_rows = own.masked_fill(own == 0, self.temperature)
        return of_rows.repeat_interleave(rows.lengths.to(own.device), output_size=tokens)

    def _check_kl(self, rows: Tokens, other: CausalLM, given: Ragged | None, over: str) -> None:
        if other.trainable:
            raise UserError(
                f"`kl` to {other.model!r}, which is trained: no gradient would go to it; give a frozen model, as"
                f" CausalLM({other.model!r}, trainable=False) or `averaged`"
            )
        if over not in ("self", "other"):
            raise UserError(f"`over` of `kl` is {over!r}; it is 'self' or 'other'")
        if given is not None and other.reads_pictures and PICTURES in columns_of(rows):
            raise UserError(
                f"`kl` was given other prompts for rows with images, and {other.model!r} would not see these; leave"
                " `given` out, or take rows without images"
            )
        if given is not None and len(given) != len(rows.lengths):
            raise UserError(f"`kl` was given {len(given)} other prompts for {len(rows.lengths)} rows; give one a row")

    def _of_tokens(self, rows: Tokens, top: int, ids: Tensor | None = None) -> tuple[Tensor, ...]:
        _refuse_support(rows, "logprobs_of" if ids is not None else "topk")

        def score(own: Tokens, asked: Tensor | None) -> tuple[ModelInput, tuple[Tensor, ...]]:
            if asked is not None:
                places = response_mask(own).flatten().nonzero().flatten()  # on the host: no device is waited for
                asked = rows_at(asked.flatten(0, 1), places)
            return self._forward_pass(own, self._temperature_of(own), partial(of_tokens, top), asked)

        logprobs, *found = self._by_micro_batch(rows, score, ids)
        self.watch(rows, logprobs)
        return tuple(found)

    def attach_generator(self, generator: Callable[..., Any], converser: Callable[..., Any]) -> None:
        """Set the functions behind `generate` and `converse`; called before the first step."""
        self._generator = generator
        self._converser = converser

    def initial(self) -> CausalLM:
        """A frozen model with this model's initial weights: this model without its adapters, or a second copy."""
        if self.lora is not None:
            return self.without_adapters()
        return CausalLM(
            self.model, trainable=False, temperature=self.temperature, trust_remote_code=self.trust_remote_code
        )

    def only_scores(self, like: CausalLM | None = None) -> None:
        """See `ModelHandle.only_scores`.

        Args:
            like: Model that this one is compared with; this one takes its temperature.

        Raises:
            UserError: This model has a temperature of its own that differs from `like`'s.
        """
        super().only_scores()
        if like is not None:
            if self.temperature not in (1.0, like.temperature):
                raise UserError(
                    f"`temperature` is {self.temperature} for {self.model!r} and {like.temperature} for {like.model!r},"
                    " and distributions of one temperature are compared; leave the first out",
                    of=self,
                )
            self.temperature = like.temperature

    def without_adapters(self) -> WithoutAdapters:
        """A frozen view of this model with its initial weights: it leaves the adapters out, and needs no second copy.

        Raises:
            UserError: This model has no adapters.
        """
        if self.lora is None:
            raise UserError(f"{self.model!r} has no adapters to leave out; set `lora`, or load the model once more")
        return WithoutAdapters(self)

    def averaged(self, decay: float) -> EMA:
        """A frozen model that follows this one: an exponential moving average of its weights.

        The average starts with this model's initial weights. After this model's updates in a step, each weight of the
        average becomes decay * average + (1 - decay) * weight. Averages are stored in float32 at least, sharded over
        ranks like this model's weights, and saved in checkpoints (mean teacher: Tarvainen and Valpola, arXiv
        1703.01780).

        Args:
            decay: Decay of the average, from 0 to below 1. With 0 the average is this model after the previous step.

        Raises:
            UserError: `decay` is not in this range, this model is frozen, or it trains adapters.
        """
        if not 0 <= decay < 1:
            raise UserError(f"`decay` of `averaged` is {decay}; give 0 to below 1, such as 0.99")
        if not self.trainable:
            raise UserError(f"{self.model!r} is frozen, so its average never moves; set `trainable`, or use it itself")
        if self.lora is not None:
            raise UserError(
                f"`averaged` of {self.model!r}, which trains adapters: the product of averaged factors is not the"
                " average of models, and an average of whole weights is the second copy that adapters avoid; leave"
                " `lora` out, or compare with `without_adapters()`"
            )
        return EMA(self, decay)

    @property
    def kind(self) -> type[ScoringModel]:
        """See `ModelHandle.kind`."""
        return ScoringModel

    @property
    def model_inputs(self) -> tuple[str, ...]:
        """See `ModelHandle.model_inputs`."""
        replays = self.trainable and self.moe is not None and self.moe.routing_replay
        sampled = {SUPPORT: self.reads_support, TEMPERATURE: self.reads_temperature}
        read = [name for name, reads in sampled.items() if reads]
        return (*super().model_inputs, *(("experts",) if replays else ()), *read)

    @contextmanager
    def training(self) -> Iterator[None]:
        """See `ModelHandle.training`."""
        self._routed.clear()
        with super().training():
            yield

    def take_routed(self) -> tuple[Tensor | None, Tensor | int, int]:
        """See `ModelHandle.take_routed`."""
        if self.moe is None or not self._routed:
            return super().take_routed()
        seen, self._routed = self._routed, []
        loss = None
        if self.moe.router_aux_loss_coef > 0:
            of_passes = [
                _router_loss(routing, read) * (read.useful_tokens > 0)  # not of the dummy token of a pass without rows
                for routing, read in seen
            ]
            loss = self.moe.router_aux_loss_coef * torch.stack(of_passes).sum()
        replayed = [
            read.by_sequence(routing.otherwise())[0] for routing, read in seen if routing.chosen is not None
        ]  # counted by row, however rows share tokens
        otherwise = torch.stack([differs.sum() for differs in replayed]).sum() if replayed else 0
        return loss, otherwise, sum(differs.numel() for differs in replayed)

    def _prepare(self, model: PackedModel) -> None:
        super()._prepare(model)
        if self.moe is None:
            return
        if self.moe.freeze_router:
            for router in routers(model):
                router.requires_grad_(False)
        if self.moe.watches:
            watch_routers(model.model)

    def _routing(self, read: ModelInput) -> Routing | None:
        if self.moe is None or not self.moe.watches:
            return None
        chosen = read.columns.get("experts") if self.moe.routing_replay else None
        if self.in_training and self.moe.routing_replay and chosen is None and read.useful_tokens > 0:
            raise UserError(
                f"`moe.routing_replay` is set for {self.model!r}, and the rows that it is trained on have no `experts`;"
                " train on a `Batch` or a `Rollout`, or leave the setting out"
            )
        routing = Routing(chosen)
        if self.in_training:
            self._routed.append((routing, read))
        return routing


def _router_loss(routing: Routing, read: ModelInput) -> Tensor:
    """The load-balancing loss summed over the rows of a forward pass, 0-dim; a shared token counts in each row."""
    logits, lengths = read.by_sequence(routing.logits)
    used, _ = read.by_sequence(routing.used)
    return load_balancing_loss(logits, used, lengths).sum()


def _refuse_support(rows: Tokens, method: str) -> None:
    if supports(rows) is not None:
        raise UserError(
            f"`{method}` is over the whole vocabulary, and the rows were sampled from some of it; leave out `top_p`,"
            " `top_k` and `min_p` of their policy, and of the `sampling` of their dataset"
        )


def _ignore(rows: Tokens, logprobs: Tensor) -> None:
    """The default of `CausalLM.watch`: does nothing."""


class WithoutAdapters(CausalLM):
    """A trained language model with its adapters off, without weights of its own; `CausalLM.without_adapters` makes it.

    Args:
        owner: The trained model.
    """

    def __init__(self, owner: CausalLM) -> None:
        super().__init__(
            owner.model, trainable=False, temperature=owner.temperature, trust_remote_code=owner.trust_remote_code
        )
        self.owner = owner

    def attach_to_owner(self) -> None:
        """Score with the owner's module and plan from now on."""
        assert self.owner._forward is not None, "the owner is set up first"
        self.attach(self.owner._forward, self.owner.plan)

    def _forward_pass(self, rows: Tokens, *arguments: object) -> tuple[ModelInput, tuple[Tensor, ...]]:
        assert self._forward is not None, "attach comes first"
        with adapters_off(self._forward):
            return super()._forward_pass(rows, *arguments)


class EMA(CausalLM):
    """The moving average of a trained language model, a model of its own; `CausalLM.averaged` makes it.

    Args:
        owner: The trained model.
        decay: Share of the average that a step keeps.
    """

    def __init__(self, owner: CausalLM, decay: float) -> None:
        super().__init__(
            owner.model, trainable=False, temperature=owner.temperature, trust_remote_code=owner.trust_remote_code
        )
        self.owner = owner
        self.decay = decay

    def _prepare(self, model: PackedModel) -> None:
        super()._prepare(model)
        model.held_as_trained = True


class ScoringModel(PackedModel):
    """A causal language model with an output layer that returns log-probabilities and entropies in place of logits.

    Args:
        causal_lm: The transformers model; its output layer has no bias.
    """

    def __init__(self, causal_lm: Any) -> None:
        head = causal_lm.get_output_embeddings()
        assert head.bias is None  # see `check_architecture`
        causal_lm.set_output_embeddings(TokenHead(head.weight, Softmax.of(causal_lm.config)))
        super().__init__(causal_lm)

    @property
    def decoder(self) -> Any:
        """See `PackedModel.decoder`."""
        return self.model.get_decoder()

    @property
    def output_layer(self) -> Any:
        """See `PackedModel.output_layer`."""
        return self.model.get_output_embeddings()

    def use_float32_head(self) -> None:
        """See `PackedModel.use_float32_head`."""
        self.output_layer.softmax = replace(self.output_layer.softmax, wide=True)

    def own_scores(self, forward: nn.Module, tokens: Tensor, prompt: int) -> Tensor:
        """Log-probabilities of the tokens after the prompt; see `PackedModel.own_scores`."""
        logits: Tensor = forward(tokens[None])[0, prompt - 1 : -1]
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        return logprobs.gather(1, tokens[prompt:, None])[:, 0]


class TokenHead(nn.Module):
    """A model's output layer that returns log-probabilities and entropy in place of logits.

    It holds the weight of the layer that it replaces, tied or not. All work is done within `forward`, since ZeRO-3
    gathers the weight there.

    Args:
        weight: `[V, H]`, the weight of the layer that it replaces.
        softmax: Map of the model's products to a distribution; each forward sets the temperature.
    """

    def __init__(self, weight: nn.Parameter, softmax: Softmax) -> None:
        super().__init__()
        self.weight = weight
        self.softmax = softmax

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor = 1.0,
        readout: Readout | None = None,
        *head_inputs: Any,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities `[N]` of the targets, and entropies `[N]`; or what `readout` computes instead.

        Args:
            hidden: `[N, H]`, hidden states.
            targets: `[N]` int64.
            temperature: Temperature that divides the logits; or `[N]`, one for each token.
            readout: Function to compute instead of the two.
            head_inputs: Further arguments of the readout; a tensor has an entry for each target, `[N, ...]`.
        """
        softmax = self.softmax_at(temperature)
        if readout is not None:
            return readout(hidden, self.weight, targets, softmax, *head_inputs)
        return token_logprobs(hidden, self.weight, targets, softmax)

    def softmax_at(self, temperature: float | Tensor) -> Softmax:
        """The layer's softmax at a temperature, or at one for each token."""
        return replace(self.softmax, temperature=temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]` hidden states to the products `[..., V]` of the layer that this replaces."""
        return nn.functional.linear(hidden, self.weight)


# A function that an output layer calls within its forward, where ZeRO-3 and FSDP have gathered its weight. It takes the
# hidden states `[N, H]`, the layer's weight `[V, H]`, the targets `[N]`, the layer's softmax, and what else is given,
# such as `[N, ...]` with further numbers for each target. It returns values `[N, ...]`.
Readout = Callable[..., tuple[Tensor, ...]]


def of_tokens(
    top: int, hidden: Tensor, weight: Tensor, targets: Tensor, softmax: Softmax, others: Tensor | None
) -> tuple[Tensor, ...]:
    """A readout: log-probabilities of the targets, of the `[R, K]` tokens `others`, and of the `top` likeliest tokens.

    Returns:
        `[R]` log-probabilities of the targets, `[R, K + top]` of the other tokens, and `[R, K + top]` these tokens.
    """
    ids = targets[:, None] if others is None else torch.cat([targets[:, None], others], 1)
    logprobs, _, tokens = logprobs_of_tokens(hidden, weight, ids, softmax, top)
    return logprobs[:, 0], logprobs[:, 1:], tokens[:, 1:]


def over_support(
    hidden: Tensor, weight: Tensor, targets: Tensor, softmax: Softmax, support: Tensor | None
) -> tuple[Tensor, ...]:
    """A readout: `[R]` log-probabilities of the targets and `[R]` entropies over the tokens `support` of `supports`."""
    return token_logprobs(hidden, weight, targets, softmax, support=support)


def of_support(
    hidden: Tensor, weight: Tensor, targets: Tensor, softmax: Softmax, support: Tensor | None
) -> tuple[Tensor, ...]:
    """Like `over_support`, and then the `[R, K]` log-probabilities of these tokens; K is 0 where `support` is None."""
    ids = targets[:, None] if support is None else torch.cat([targets[:, None], support.clamp(min=0)], 1)
    logprobs, entropy, _ = logprobs_of_tokens(hidden, weight, ids, softmax, support=support)
    return logprobs[:, 0], entropy, logprobs[:, 1:]


def states(hidden: Tensor, weight: Tensor, targets: Tensor, softmax: Softmax) -> tuple[Tensor, ...]:
    """A readout: `[R, H]`, the hidden states themselves, in float32 at least; the weight gets a gradient of 0."""
    return (hidden.to(torch.promote_types(hidden.dtype, torch.float32)) + 0.0 * weight[0, 0],)


def stored_weights(
    path: Path, dtype: torch.dtype, bucket_bytes: int, trust_remote_code: bool = False
) -> Iterator[list[tuple[str, Tensor]]]:
    """Load a model on the CPU and yield its full tensors by Hugging Face name, tied ones once.

    Args:
        path: A folder in Hugging Face form, or a Hugging Face name.
        dtype: Dtype of the tensors.
        bucket_bytes: Most bytes of a bucket, unless it has one larger tensor.
        trust_remote_code: Whether code in the folder of the weights may run.
    """
    model = ScoringModel.load(path, dtype, torch.device("cpu"), trust_remote_code=trust_remote_code)
    for bucket in in_buckets(model.weights(), lambda weight: weight.parameter.nbytes, bucket_bytes):
        yield [(weight.name, weight.parameter.detach()) for weight in bucket]
