"""Layers that carry a state from token to token (convolutions, delta rules, scans), each row from a state of zeros.

Such a mixer reads the rows of a packed line side by side, `[S, L, H]`, padded on the right; all else in the model reads
the line. It looks backwards only, so what is behind a row changes nothing in it. Where kernels are installed that know
where rows of a line begin, it reads the line as it is, and they start anew at each row.

A mixer runs once for all rows. At ZeRO-3 each run of a layer gathers its weights on all ranks, which have other numbers
of rows: run by run they would wait for each other. So the rows of one micro-batch are of like length instead, see
`ForwardPlan.side_by_side`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

STATE_LAYERS = {"conv", "hybrid", "linear_attention"}  # of `layer_types`: those that have a mixer
ROW_NUMBERS = "seq_idx"  # transformers' name of the argument that carries them to every mixer
# What else transformers hands to a mixer about the rows of a line; padded, they are of one length.
PLACES = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


@dataclass(frozen=True)
class Kernel:
    """A function for CUDA that transformers calls in place of its own, where its package is installed.

    Attributes:
        module: Module of the package.
        name: Name of the function.
        argument: Name of its argument by which it knows the rows of a line.
    """

    module: str
    name: str
    argument: str

    def knows_rows(self) -> bool:
        """Whether it is installed, and has the argument."""
        try:
            function = getattr(import_module(self.module), self.name)
        except Exception:  # what a package raises that was built for another torch; transformers takes its own then
            return False
        return self.argument in signature(function).parameters


CONVOLUTION = Kernel("causal_conv1d", "causal_conv1d_fn", ROW_NUMBERS)
DELTA_RULE = Kernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "cu_seqlens")
SCAN = Kernel("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", ROW_NUMBERS)
CONVOLUTION_AND_SCAN = Kernel("mamba_ssm.ops.triton.ssd_combined", "mamba_split_conv1d_scan_combined", ROW_NUMBERS)


@dataclass(frozen=True)
class Mixer:
    """A kind of mixer.

    Attributes:
        kernels: What computes its states on CUDA, all of which must know rows; none where transformers does not tell
            them.
        state: Names of the sizes whose product is a row's state, without what the convolution keeps.
    """

    kernels: tuple[Kernel, ...] = ()
    state: tuple[str, ...] = ()


GATED_DELTA_NET = Mixer((CONVOLUTION, DELTA_RULE), ("num_v_heads", "head_k_dim", "head_v_dim"))  # arXiv 2412.06464
KIMI_DELTA_ATTENTION = Mixer((), ("num_heads", "head_dim", "head_dim"))  # arXiv 2510.26692
MAMBA2 = Mixer(  # arXiv 2405.21060
    (CONVOLUTION, SCAN, CONVOLUTION_AND_SCAN), ("num_heads", "head_dim", "ssm_state_size")
)
SHORT_CONVOLUTION = Mixer((CONVOLUTION,))

MIXERS = {  # by the name of transformers' class
    "FalconH1Mixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "KimiLinearDeltaAttention": KIMI_DELTA_ATTENTION,
    "Lfm2ShortConv": SHORT_CONVOLUTION,
    "NemotronHMamba2Mixer": MAMBA2,
    "Qwen3NextGatedDeltaNet": GATED_DELTA_NET,
    "Qwen3_5GatedDeltaNet": GATED_DELTA_NET,
    "Qwen3_5MoeGatedDeltaNet": GATED_DELTA_NET,
}


def has_states(config: Any) -> bool:
    """Whether layers of a model carry a state, by its transformers configuration."""
    return not STATE_LAYERS.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or ())


def mixers_of(model: nn.Module) -> set[str]:
    """Names of the classes in a transformers model that carry a state: each has a convolution of its own."""
    return {
        type(module).__name__
        for module in model.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    }


def keep_rows_apart(model: nn.Module) -> None:
    """Let each mixer of a transformers model start anew at each row of a line."""
    mixer: Any
    for mixer in model.modules():
        own: Any = type(mixer)
        kind = MIXERS.get(own.__name__)
        if kind is not None:
            mixer.__class__ = _of_rows(own)
            mixer.kernels_know_rows = bool(kind.kernels) and all(kernel.knows_rows() for kernel in kind.kernels)


def has_mixers(model: nn.Module) -> bool:
    """Whether layers of a model carry a state."""
    return any(isinstance(module, MixerOfRows) for module in model.modules())


def reads_side_by_side(model: nn.Module) -> bool:
    """Whether mixers of a model read rows padded to the longest of a line."""
    return any(isinstance(module, MixerOfRows) and not module.kernels_know_rows for module in model.modules())


def read_by_kernels(model: nn.Module) -> set[str]:
    """Names of a model's linear layers whose weights a kernel reads on CUDA, without calling the layers."""
    return {
        f"{name}.out_proj"
        for name, module in model.named_modules()
        if CONVOLUTION_AND_SCAN in MIXERS.get(type(module).__name__, SHORT_CONVOLUTION).kernels
    }


def state_size(model: nn.Module) -> int:
    """Numbers that the mixers of a transformers model keep of a row, however long it is."""
    total = 0
    for module in model.modules():
        if (kind := MIXERS.get(type(module).__name__)) is not None:
            total += sum(child.weight.numel() for child in module.children() if isinstance(child, nn.Conv1d))
            total += prod(getattr(module, size) for size in kind.state) if kind.state else 0
    return total


def row_numbers(cu_seqlens: Tensor) -> Tensor:
    """`[1, N]` int32, the number of each token's row, of rows that start at `cu_seqlens` `[S + 1]`."""
    rows = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
    return rows.repeat_interleave(cu_seqlens.diff())[None]


@cache
def _of_rows(kind: Any) -> Any:
    """The same mixer, reading rows; it has the name of its class."""
    return type(kind.__name__, (MixerOfRows, kind), {})


class MixerOfRows:
    """What is changed of a mixer; the other base of its class is transformers' own.

    Attributes:
        kernels_know_rows: Whether the mixer's kernels start anew at each row of a line.
    """

    kernels_know_rows: bool

    def forward(self, hidden_states: Tensor, *arguments: Any, seq_idx: Tensor | None = None, **keywords: Any) -> Tensor:
        """`[1, N, H]` to `[1, N, H]`.

        Rows are known by an argument, so that a checkpointed layer knows the same in its backward pass.

        Args:
            hidden_states: The line; or `[S, L, H]`, rows that are padded already.
            arguments: What else transformers passes along.
            seq_idx: `[1, N]` int32, see `row_numbers`; None where rows are padded, or there is one.
            keywords: What else transformers passes along.
        """
        own: Any = super()
        if seq_idx is None:
            padded: Tensor = own.forward(hidden_states, *arguments, **keywords)
            return padded
        if self.kernels_know_rows:
            line: Tensor = own.forward(hidden_states, *arguments, seq_idx=seq_idx, **keywords)
            return line
        rows = seq_idx[0].long()
        lengths = rows.bincount()
        longest = int(lengths.max())
        starts = lengths.cumsum(0) - lengths
        places = rows * longest + torch.arange(len(rows), device=rows.device) - starts[rows]  # [N], in [S * L]
        empty = hidden_states.new_zeros(len(lengths) * longest, hidden_states.shape[2])
        side_by_side = empty.index_copy(0, places, hidden_states[0]).view(len(lengths), longest, -1)
        keywords = {name: value for name, value in keywords.items() if name not in PLACES}
        mixed: Tensor = own.forward(side_by_side, *arguments, **keywords)
        return mixed.flatten(0, 1).index_select(0, places)[None]
