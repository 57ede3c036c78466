"""Tensor parallelism: consecutive ranks divide each layer of a model, and compute with their parts of it.

As in Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3): a rank has some of the attention heads, some of the
columns within a feed-forward layer, and some rows of the embedding and of the output layer. The input and the output of
a block are the same on all of these ranks. A layer costs four all-reduces: two forward, two backward.

Transformers says which weights are divided, and how (`base_model_tp_plan` of a configuration). Parameters are
`DTensor`s, so that FSDP can divide them further; each module here computes with this rank's part, `to_local()`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rlflow.errors import UserError
from rlflow.models.attention import heads_of
from rlflow.models.causal_lm import Readout, TokenHead
from rlflow.models.handle import ModelHandle
from rlflow.models.logprobs import divided_logprobs
from rlflow.models.lora import adapted_layers
from rlflow.models.packed import PackedModel, linear
from rlflow.models.weights import ADAPTER

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Types of models that tests train with divided layers. They have plain embeddings, and a block's weights are all in
# transformers' plan, except experts, which `expert_parallel` divides.
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
# Styles of transformers' plan, which thinks of the transposed weight: its columns are rows of `weight`.
BY_ROWS, BY_COLUMNS, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"


def check_tensor_parallel(config: Any, size: int, role: str, handle: ModelHandle) -> None:
    """Refuse a model whose layers cannot be divided; called before any weight is loaded.

    Args:
        config: The model's transformers configuration.
        size: Number of ranks that divide each layer.
        role: Name of the role, for the error.
        handle: The role's model.

    Raises:
        UserError: The model is not of a known family, or its sizes cannot be divided by `size`.
    """
    if size == 1:
        return
    setting, text = f"`placement.{role}.tensor_parallel_size` is {size}", config.get_text_config()
    if handle.lora is not None and handle.lora.dropout:
        raise UserError(
            f"{setting}, and `lora.dropout` of `{role}` is {handle.lora.dropout}, which ranks would draw apart for the"
            " same tokens; set one of the two to 0 or 1"
        )
    if config.model_type not in FAMILIES:  # a text model within one that also reads images is not tried
        raise UserError(
            f"{setting}, and the model of `{role}` is of the type {config.model_type!r}; layers can be divided in"
            f" {', '.join(FAMILIES)}; set it to 1: FSDP divides its weights"
        )
    heads, kv_heads = heads_of(config)
    for count, what in ((heads, "attention heads"), (kv_heads, "heads of keys"), (text.intermediate_size, "columns")):
        if count % size:
            raise UserError(
                f"{setting}, which does not divide the {count} {what} of the model of `{role}`; give a divisor of"
                f" {heads} heads, {kv_heads} heads of keys and {text.intermediate_size} columns within a layer"
            )
    if text.vocab_size < size**2:
        raise UserError(
            f"{setting}, and the model of `{role}` has {text.vocab_size} tokens, so a rank may get none; give at most"
            f" {int(text.vocab_size**0.5)}"
        )


def divide_layers(model: PackedModel, mesh: DeviceMesh) -> None:
    """Divide the layers of a model among the ranks of a mesh of one dimension.

    Args:
        model: A scoring model whose parameters are on the device `meta`.
        mesh: Ranks that divide each layer.
    """
    from torch.distributed.tensor import Replicate, Shard

    inner, group = model.model, mesh.get_group()
    adapted = {} if model.lora is None else dict(adapted_layers(inner))
    blocks = set()
    for name, module in list(inner.named_modules()):
        style = (inner.tp_plan or {}).get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        adapter = adapted.get(name)
        linear = module if adapter is None else adapter.get_base_layer()
        if style == BY_ROWS and name != "lm_head":
            _divide(linear, RowsOfLinear, mesh, weight=Shard(0), bias=Shard(0))
            if adapter is not None:  # all ranks have the inner features, each for rows of its own
                _share(adapter.lora_A[ADAPTER], mesh)
                _divide(adapter.lora_B[ADAPTER], RowsOfLinear, mesh, weight=Shard(0))
            blocks.add(name.rpartition(".")[0])
        elif style == BY_COLUMNS:
            _divide(linear, ColumnsOfLinear, mesh, weight=Shard(1), bias=Replicate())
            if adapter is not None:  # the inner features are summed over ranks, and are the same on all from there on
                _divide(adapter.lora_A[ADAPTER], ColumnsOfLinear, mesh, weight=Shard(1))
        elif style == WHOLE:  # each rank's heads are a part of what it scales
            _share(module, mesh)
    for block in blocks:
        inner.get_submodule(block).register_forward_pre_hook(_SumOfGradients.of_first(group), with_kwargs=True)
    embedding, head = inner.get_input_embeddings(), model.output_layer
    assert type(embedding) is nn.Embedding, type(embedding)
    tied = head.weight is embedding.weight
    _divide(embedding, RowsOfEmbedding, mesh, weight=Shard(0))
    if type(head) is TokenHead:  # one of a single label is whole on every rank, as a norm is
        _divide(head, RowsOfTokenHead, mesh, weight=Shard(0))
    if tied:
        head.weight = embedding.weight


def _divide(module: Any, kind: type[nn.Module], mesh: DeviceMesh, **placements: Any) -> None:
    """Make a module one of `kind`, with its parameters placed on the mesh."""
    from torch.distributed.tensor import distribute_tensor

    module.__class__ = kind
    for name, placement in placements.items():
        if (whole := module._parameters.get(name)) is not None:
            part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
            module._parameters[name] = nn.Parameter(part, whole.requires_grad)


def _share(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let every rank have a module whole, and sum the gradients of its weight over the ranks."""
    from torch.distributed.tensor import Replicate

    kind = type(module)
    _divide(module, type(f"Shared{kind.__name__}", (Shared, kind), {}), mesh, weight=Replicate())


class RowsOfLinear(nn.Linear):
    """Some rows of a linear layer's weight: its output has as many features, such as those of some heads."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, _local(self.weight), None if self.bias is None else _local(self.bias))


class ColumnsOfLinear(nn.Linear):
    """Some columns of a linear layer's weight, for the features that this rank has; the output is summed over ranks."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Sum.apply(linear(input, _local(self.weight)), _group(self.weight))  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + _local(self.bias)


class RowsOfEmbedding(nn.Embedding):
    """Some rows of an embedding. Tokens of other rows are 0 here; the output is summed over ranks."""

    def forward(self, input: Tensor) -> Tensor:
        rows = _local(self.weight)
        first = first_row(self.weight)
        absent = (input < first) | (input >= first + len(rows))
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < len(rows):
            padding = None
        found = nn.functional.embedding((input - first).masked_fill(absent, 0), rows, padding)
        output: Tensor = _Sum.apply(found.masked_fill(absent[..., None], 0.0), _group(self.weight))  # type: ignore[no-untyped-call]
        return output


class Shared(nn.Module):
    """A norm or linear layer that every rank has whole and uses for its part: its gradient is summed over the ranks."""

    def forward(self, hidden: Tensor) -> Tensor:
        from torch.distributed.tensor import Partial

        weight: Any = self._parameters["weight"]
        # A plain attribute cannot be set to a tensor that is not a parameter.
        self._parameters["weight"] = weight.to_local(grad_placements=[Partial()])
        try:
            output: Tensor = super().forward(hidden)
        finally:
            self._parameters["weight"] = weight
        return output


class RowsOfTokenHead(TokenHead):
    """Some rows of the output layer: this rank has the logits of some tokens of the vocabulary."""

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor = 1.0,
        readout: Readout | None = None,
        *head_inputs: Any,
    ) -> tuple[Tensor, ...]:
        """See `TokenHead.forward`; for a `readout` the weight is gathered, and each rank computes the same."""
        if readout is not None:
            return readout(hidden, _gathered(self.weight), targets, self.softmax_at(temperature), *head_inputs)
        rows, first, group = _local(self.weight), first_row(self.weight), _group(self.weight)
        return divided_logprobs(hidden, rows, targets, first, group, self.softmax_at(temperature))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `TokenHead.logits`."""
        return nn.functional.linear(hidden, _gathered(self.weight))


def first_row(weight: Any) -> int:
    """The first row that this rank has of a weight whose rows a layer's ranks divide: of 10 on 4 ranks 0, 3, 6 or 9."""
    mesh, rows = weight.device_mesh, weight.shape[0]
    first: int = min(-(-rows // mesh.size()) * mesh.get_local_rank(), rows)
    return first


def _local(weight: Any) -> Tensor:
    part: Tensor = weight.to_local()
    return part


def _gathered(weight: Any) -> Tensor:
    whole: Tensor = weight.full_tensor()
    return whole


def _group(weight: Any) -> ProcessGroup:
    group: ProcessGroup = weight.device_mesh.get_group()
    return group


class _Sum(torch.autograd.Function):
    """The sum over ranks, which all of them have; the gradient goes to each."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(part)
        dist.all_reduce(part, group=group)
        return part

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumOfGradients(torch.autograd.Function):
    """A value that all ranks have; the gradients from their parts of the work with it are summed."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None

    @classmethod
    def of_first(cls, group: ProcessGroup) -> Any:
        """A hook of a block of a layer: its gradient by the hidden states that it is given is summed over `group`."""
        apply: Any = cls.apply

        def enter(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if given:
                return (apply(given[0], group), *given[1:]), named
            return given, {**named, "hidden_states": apply(named["hidden_states"], group)}

        return enter
