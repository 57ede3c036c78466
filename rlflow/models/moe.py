"""Training of mixtures of experts: settings, the experts that a forward pass uses, and how even their load is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.errors import UserError
from rlflow.models.sizes import experts

ROUTING = "routing"  # the argument of layers that carries a `Routing`
ROUTER_BIAS = "e_score_correction_bias"  # transformers' name of a buffer that is added where experts are chosen


@dataclass(frozen=True)
class MoE:
    """Settings for training the experts and routers of a mixture of experts.

    Attributes:
        freeze_router: Do not train the weights of routers.
        router_aux_loss_coef: Weight of the load-balancing loss, see `load_balancing_loss`; 0 is off.
        routing_replay: Train with the experts that the rollout engine chose for each token of prompt and response (R3,
            arXiv 2510.11370). The trainer's own router weights these experts, normalised over them. The engine must
            return its choice, as `TransformersEngine` does.
    """

    freeze_router: bool = False
    router_aux_loss_coef: float = 0.0
    routing_replay: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.router_aux_loss_coef < float("inf"):
            raise UserError(f"`moe.router_aux_loss_coef` is {self.router_aux_loss_coef}; give 0 or more, such as 0.001")
        if self.freeze_router and self.router_aux_loss_coef > 0:
            raise UserError(
                f"`moe.router_aux_loss_coef` is {self.router_aux_loss_coef}, and `moe.freeze_router` freezes the"
                " routers that it would train; set one of the two"
            )

    @property
    def watches(self) -> bool:
        """Whether the experts of forward passes are replayed or recorded."""
        return self.routing_replay or self.router_aux_loss_coef > 0


class Routing:
    """The experts that one forward pass uses, and its routers' logits. `N` tokens, `k` of `E` experts for each.

    Args:
        chosen: `[N, layers, k]` integers, the experts to use; None for those that the routers choose.
    """

    def __init__(self, chosen: Tensor | None = None) -> None:
        self.chosen = chosen
        self._logits: dict[int, Tensor] = {}
        self._own: dict[int, Tensor] = {}

    @property
    def own(self) -> Tensor:
        """`[N, layers, k]` int64, the experts that the routers chose, likeliest first."""
        return torch.stack([self._own[layer] for layer in sorted(self._own)], dim=1)

    @property
    def used(self) -> Tensor:
        """`[N, layers, k]` int64, the experts that the tokens went to."""
        return self.own if self.chosen is None else self.chosen.long()

    @property
    def logits(self) -> Tensor:
        """`[N, layers, E]`, logits of the routers."""
        return torch.stack([self._logits[layer] for layer in sorted(self._logits)], dim=1)

    def route(self, router: nn.Module, layer: int, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Replace a router's `output`: its logits, the weights of the experts, and their numbers."""
        logits, weights, own = output
        self._own[layer], self._logits[layer] = own, logits
        if self.chosen is None:
            return output
        chosen = self.chosen[:, layer].long()
        return logits, WEIGHTS[type(router).__name__](router, logits, chosen).to(weights.dtype), chosen

    def otherwise(self) -> Tensor:
        """`[N, layers]` bool, where the router chose other experts than those used."""
        return (self.own.sort(-1).values != self.used.sort(-1).values).any(-1)


def _normalised(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """Weights of Mixtral and Qwen3-MoE: probabilities among all experts; normalised over those chosen if so set."""
    of_chosen = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    return of_chosen / of_chosen.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else of_chosen


def _softmax_of_chosen(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """Weights of GPT-OSS: probabilities among the chosen experts alone."""
    return logits.gather(-1, chosen).softmax(-1)


# How the chosen experts are weighted, by the class of transformers' router.
WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "GptOssTopKRouter": _softmax_of_chosen,
    "MixtralTopKRouter": _normalised,
    "Qwen3MoeTopKRouter": _normalised,
}
TYPES = ("gpt_oss", "mixtral", "qwen3_moe")


def check_moe(config: Any, setting: str) -> None:
    """Refuse settings of experts for a model that has no experts, or routers of an unknown kind.

    Args:
        config: The model's transformers configuration.
        setting: Name of the setting in the error, such as `moe`.

    Raises:
        UserError: The model has no routers that are known here.
    """
    if config.model_type in TYPES:
        return
    why = "has no experts" if experts(config.to_dict()) is None else "has routers that are not known here"
    raise UserError(f"{setting} is given, and the model, of the type {config.model_type!r}, {why}; leave it out")


def expert_dtype(config: Any) -> torch.dtype:
    """The dtype in which the numbers of a model's experts are stored."""
    found = experts(config.get_text_config().to_dict())
    return torch.uint8 if found is None or found[1] <= 256 else torch.int16


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a model's layers, in order."""
    return [module for module in model.modules() if type(module).__name__ in WEIGHTS]


def watch_routers(model: Any) -> None:
    """Let the routers of a transformers model follow the `Routing` that its forward is given as `routing`.

    Each layer gets the `Routing` as an argument, so that a checkpointed layer computes the same in the backward pass.

    Args:
        model: Model with the routers in its `layers`.
    """
    current: dict[nn.Module, Routing | None] = {}

    def before_layer(router: nn.Module) -> Callable[..., Any]:
        def take(layer: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
            current[router] = keywords.pop(ROUTING, None)
            return args, keywords

        return take

    def after_router(number: int) -> Callable[..., Any]:
        def follow(router: nn.Module, args: Any, output: Any) -> Any:
            routing = current.pop(router, None)
            return output if routing is None else routing.route(router, number, output)

        return follow

    number = 0
    for layer in model.get_decoder().layers:
        for router in routers(layer):
            layer.register_forward_pre_hook(before_layer(router), with_kwargs=True)
            router.register_forward_hook(after_router(number))
            number += 1


def load_balancing_loss(logits: Tensor, used: Tensor, lengths: Tensor) -> Tensor:
    """Unevenness of the experts' loads within each sequence: 1 if all have the same load, at most `E / k`.

    For a sequence of T tokens and a layer, Switch Transformer's loss (arXiv 2101.03961, equations 4 to 6):

        E sum_e f_e P_e,    f_e = 1/(k T) sum_t [e is used for t],    P_e = 1/T sum_t softmax(logits_t)_e

    averaged over layers. Gradients go through P. The loss is computed for each sequence, as in DeepSeek-V3's balance
    loss (arXiv 2412.19437, equations 17 to 20). It is not computed for the batch: f and P of a batch are not sums over
    its parts, so the loss would depend on how rows are split. Transformers' `load_balancing_loss_func` is computed over
    all layers and the batch, and is k times as large.

    Args:
        logits: `[N, layers, E]`, logits of the routers.
        used: `[N, layers, k]` int64, the experts that computed each token.
        lengths: `[S]` int64, number of tokens of each sequence; the sequences are stored one after the other.

    Returns:
        `[S]`, the loss of each sequence.
    """
    tokens, layers, count = logits.shape
    sequence = torch.arange(len(lengths), device=logits.device).repeat_interleave(lengths, output_size=tokens)
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    chosen = torch.zeros_like(probabilities).scatter_add_(2, used, torch.ones_like(used, dtype=probabilities.dtype))
    zeros = probabilities.new_zeros(len(lengths), layers, count)
    by = lengths.to(probabilities.dtype)[:, None, None]
    share = zeros.index_add(0, sequence, chosen) / (used.shape[-1] * by)
    mean = zeros.index_add(0, sequence, probabilities) / by
    return count * (share * mean).sum(-1).mean(-1)
