"""Models of transformers, read from their files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from rlflow.errors import UserError
from rlflow.models.remote_code import code_beside, register_decoder
from rlflow.models.weight_files import WeightFiles, not_finite
from rlflow.storage.tensors import TensorRange, is_finite

OUTPUT_LAYERS = ("lm_head", "score")  # that a model of the other kind leaves in its files


def read(
    kind: Any,
    path: Path,
    dtype: torch.dtype,
    empty: bool,
    trust_remote_code: bool = False,
    may_lack: tuple[str, ...] = (),
    **settings: Any,
) -> tuple[Any, WeightFiles | None, bool, str]:
    """A transformers model in evaluation mode, without dropout, with eager attention: transformers' own reference.

    Args:
        kind: The class that reads it, `AutoModelForCausalLM` say.
        path: Folder or Hugging Face name.
        dtype: Dtype of the parameters.
        empty: Leave parameters without memory, on the device `meta`, for `fill`; buffers are on the CPU.
        trust_remote_code: Whether code that lies beside the weights may run.
        may_lack: Weights that may be missing; they are random numbers then.
        settings: More of its configuration.

    Returns:
        The model, its files where it is empty, whether some of `may_lack` are missing, and a line about tensors
        of the files that the model does not know, which are left out; empty without.

    Raises:
        UserError: There is no such model, or weights are missing, NaN or infinite.
    """
    from safetensors import SafetensorError

    files = WeightFiles(path) if empty else None
    if empty:
        settings |= {"device_map": "meta", "use_safetensors": True}
    if dtype == torch.float64:
        settings["experts_implementation"] = "eager"  # torch's grouped products know no float64
    with code_beside(path, "architecture", trust_remote_code):
        try:
            register_decoder(path, trust_remote_code)
            loaded: Any = kind.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # which is said better below
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
                **settings,
            )
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            raise UserError(f"`model` {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
        except UnpicklingError as error:  # transformers reads files of pickles with `weights_only`
            raise UserError(
                f"`model` {str(path)!r} cannot be loaded: its weights are no safetensors, and unpickling them would do"
                " more than read tensors; take the model in safetensors"
            ) from error
    model, report = loaded
    if report["mismatched_keys"]:
        name, found, needed = min(report["mismatched_keys"])
        raise UserError(
            f"`model` {str(path)!r} cannot be loaded: {name!r} has the shape {list(found)} in its files, where"
            f" {list(needed)} is needed; give a model whose config.json fits its weights"
        )
    missing = set(report["missing_keys"]) - set(may_lack)
    if missing:
        # Transformers would go on with random numbers in their place.
        raise UserError(f"`model` {str(path)!r} lacks {len(missing)} weights, {min(missing)!r} the first of them")
    for name, tensor in () if empty else model.named_parameters():  # a buffer may hold the infinity of a mask
        if not is_finite(tensor):
            raise UserError(not_finite(path, name))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if files is not None:
        finish(model, files)
    return model.eval(), files, bool(report["missing_keys"]), _unknown(path, model, report["unexpected_keys"])


def _unknown(path: Path, model: nn.Module, names: Iterable[str]) -> str:
    unknown = [name for name in names if name.split(".")[0] not in OUTPUT_LAYERS]
    if not unknown:
        return ""
    return (
        f"`model` {str(path)!r} has {len(unknown)} tensors in its files that {type(model).__name__} does not know,"
        f" {min(unknown)!r} the first of them, and they are left out; check that config.json is of this model"
    )


COMPARED = 1 << 20  # elements at once


def finish(model: Any, files: WeightFiles) -> None:
    """Tie what is tied, and compute the buffers that no file holds, such as a rotary embedding's frequencies.

    Args:
        model: A transformers model whose parameters are on the device `meta`.
        files: Its weights.
    """
    _tie(model, files)
    owners = set()
    for name, buffer in model.named_non_persistent_buffers():
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        owner._buffers[key] = torch.empty_like(buffer, device="cpu")
        owners.add(owner)
    for owner in owners:
        owner._is_hf_initialized = False  # so `initialize_weights` does it once more, and no other
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()


def _tie(model: Any, files: WeightFiles) -> None:
    """Transformers ties weights that are equal where files hold both, and cannot compare them on the device `meta`."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if model.get_parameter(target) is model.get_parameter(source):
            continue
        if _equal(files, target, source):
            path, _, key = target.rpartition(".")
            setattr(model.get_submodule(path), key, model.get_parameter(source))
        else:
            del model.all_tied_weights_keys[target]


def _equal(files: WeightFiles, first: str, second: str) -> bool:
    shape = files.shape(first)
    if shape != files.shape(second):
        return False
    for start in range(0, shape.numel(), COMPARED):
        length = min(COMPARED, shape.numel() - start)
        parts = [TensorRange(start, torch.empty(length, dtype=torch.float64)) for _ in range(2)]
        for name, part in zip((first, second), parts, strict=True):
            files.read(name, part)
        if not torch.equal(parts[0].values, parts[1].values):
            return False
    return True
