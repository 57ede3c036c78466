"""Mixers: layers that carry a state from token to token, such as convolutions, delta rules and scans.

In a packed line, the state of a row would pass to the next row. So a mixer reads the rows side by side, `[S, L, H]`,
padded on the right, and all other layers read the line. A mixer looks backwards only, so padding after a row changes
nothing in the row. If kernels are installed that take the beginnings of rows, a mixer reads the line as it is.

A mixer runs once for all rows of a micro-batch. At ZeRO-3 the ranks gather a layer's weights each time it runs, and
ranks have different numbers of rows; if mixers ran once for each row, ranks would wait for each other forever. To
keep padding small, the rows of a micro-batch are of like length, see `ForwardPlan.side_by_side`.
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
ROW_NUMBERS = "seq_idx"  # the argument by which transformers tells every mixer each token's row
# Other arguments that tell mixers where rows of a line begin; rows side by side are not a line.
PLACES = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


@dataclass(frozen=True)
class Kernel:
    """A function of a CUDA package, which transformers calls instead of its own function if the package is installed.

    Attributes:
        package: Name of the package for `pip install`.
        module: Module of the package.
        name: Name of the function.
        argument: Argument that tells the function where rows begin.
    """

    package: str
    module: str
    name: str
    argument: str

    def knows_rows(self) -> bool:
        """Whether the function is installed and has the argument."""
        try:
            function = getattr(import_module(self.module), self.name)
        except Exception:  # such as a package built for another torch; transformers calls its own function then too
            return False
        return self.argument in signature(function).parameters


CONVOLUTION = Kernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn", ROW_NUMBERS)
DELTA_RULE = Kernel("flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "cu_seqlens")
MAMBA_KERNELS = ("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined")
SCAN = Kernel(*MAMBA_KERNELS, "mamba_chunk_scan_combined", ROW_NUMBERS)
CONVOLUTION_AND_SCAN = Kernel(*MAMBA_KERNELS, "mamba_split_conv1d_scan_combined", ROW_NUMBERS)


@dataclass(frozen=True)
class Mixer:
    """A kind of layer that carries a state, such as Mamba-2.

    Attributes:
        kernels: The functions that compute its states on CUDA; empty if transformers does not tell them about rows.
        state: Attributes of the layer whose product is the size of a row's state, without the convolution's state.
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
    """Names of the classes of mixers in a transformers model: a mixer is a module with a convolution of its own."""
    return {
        type(module).__name__
        for module in model.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    }


def keep_rows_apart(model: nn.Module) -> None:
    """Change the class of each mixer of a transformers model, so that it starts with zeros at each row of a line."""
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


def slow_states(model: nn.Module, device: torch.device) -> str:
    """A line about the packages whose kernels a model's mixers lack on this device; empty where they lack none."""
    if device.type != "cuda" or not reads_side_by_side(model):
        return ""
    kinds = {type(module).__name__ for module in model.modules() if isinstance(module, MixerOfRows)}
    missing = {kernel.package for kind in kinds for kernel in MIXERS[kind].kernels if not kernel.knows_rows()}
    fix = f"; `pip install {' '.join(sorted(missing))}` brings kernels" if missing else ", and none is known"
    return f"torch computes the states of its layers, several times slower than a kernel would{fix}"


def read_by_kernels(model: nn.Module) -> set[str]:
    """Names of the linear layers of a model that are not called on CUDA, since a kernel reads their weights."""
    return {
        f"{name}.out_proj"
        for name, module in model.named_modules()
        if CONVOLUTION_AND_SCAN in MIXERS.get(type(module).__name__, SHORT_CONVOLUTION).kernels
    }


def state_size(model: nn.Module) -> int:
    """Numbers that the mixers of a transformers model store for a row, however long it is."""
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
    """A subclass of a mixer's class that starts with zeros at each row; it has the same name."""
    return type(kind.__name__, (MixerOfRows, kind), {})


class MixerOfRows:
    """The first base of a mixer's changed class, before transformers' class.

    Attributes:
        kernels_know_rows: Whether all kernels of the mixer are installed and start with zeros at each row.
    """

    kernels_know_rows: bool

    def forward(self, hidden_states: Tensor, *arguments: Any, seq_idx: Tensor | None = None, **keywords: Any) -> Tensor:
        """The mixer's output for each token of a line, `[1, N, H]`.

        The rows are an argument, so that a checkpointed layer has the same rows in the backward pass.

        Args:
            hidden_states: `[1, N, H]`, the line; or `[S, L, H]`, rows that are padded already.
            arguments: Other arguments of transformers.
            seq_idx: `[1, N]` int32, see `row_numbers`; None if rows are padded, or there is one row.
            keywords: Other arguments of transformers.
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
