"""Expert parallelism: consecutive ranks divide the experts of each layer, and send tokens to one another.

As in GShard (Lepikhin et al., arXiv 2006.16668, section 3.2): a rank has some of a layer's experts, and all have its
router. Each token is sent to the ranks that have its experts, and what these make of it is sent back: two all-to-alls
forward, and two backward. The ranks may have rows of their own. An expert's gradient is then that of all their tokens.

Transformers says which parameters are experts (`base_model_ep_plan` of a configuration), and exchanges the tokens. A
rank whose experts get none computes with one of zeros, so all ranks make the same collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from rlflow.errors import UserError
from rlflow.models.moe import TYPES
from rlflow.models.packed import PackedModel
from rlflow.models.sizes import experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXCHANGE = "ep_dispatch_experts"  # the style of a module of experts in transformers' plan


def check_expert_parallel(config: Any, size: int, tensor_parallel_size: int, role: str) -> None:
    """Refuse a model whose experts cannot be divided, and one whose layers can be divided only with its experts.

    Args:
        config: The model's transformers configuration.
        size: Number of ranks that divide the experts of each layer.
        tensor_parallel_size: Number of ranks that divide each layer.
        role: Name of the role, for the error.

    Raises:
        UserError: The model has no experts of a known kind, or `size` does not divide these.
    """
    found = experts(config.to_dict())
    setting = f"`placement.{role}.expert_parallel_size` is {size}"
    if size == 1:
        if found is not None and tensor_parallel_size > 1:
            raise UserError(
                f"{setting}, and `tensor_parallel_size` {tensor_parallel_size}: ranks that divide a layer of the"
                f" {found[1]} experts of `{role}` divide these too; set `expert_parallel_size` to"
                f" {tensor_parallel_size} or more"
            )
        return
    if config.model_type not in TYPES:
        raise UserError(
            f"{setting}, and the model of `{role}` is of the type {config.model_type!r}; experts can be divided in"
            f" {', '.join(TYPES)}; set it to 1: FSDP divides its weights"
        )
    assert found is not None, config.model_type
    if found[1] % size:
        raise UserError(
            f"{setting}, which does not divide the {found[1]} experts of the model of `{role}`; give a divisor of them"
        )


def divide_experts(model: PackedModel, mesh: DeviceMesh, layer: DeviceMesh | None) -> list[nn.Module]:
    """Divide the experts of each layer among the ranks of a mesh of one dimension.

    Args:
        model: A scoring model whose parameters are on the device `meta`. If ranks divide its layers, they do already.
        mesh: Ranks that divide the experts of a layer.
        layer: Ranks that divide each layer, which have the same tokens: each sends a part of them. None if none do.

    Returns:
        The modules of experts, one of each layer that has some.
    """
    from transformers.distributed.tensor_parallel import apply_expert_parallelism, replace_layer_number_by_wildcard

    inner, plan = model.model, model.model.ep_plan
    apply_expert_parallelism(inner, mesh, layer, plan)  # type: ignore[arg-type]  # None is one rank to a layer
    named = inner.named_modules()
    return [module for name, module in named if plan.get(replace_layer_number_by_wildcard(name)) == EXCHANGE]
