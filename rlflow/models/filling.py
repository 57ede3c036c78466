"""Filling a model that was built without memory, once its parameters have memory for what this rank holds of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.models.lora import first_values, is_adapter, plain_name
from rlflow.models.packed import PackedModel
from rlflow.models.tensor_range import TensorRange
from rlflow.models.weight_files import WeightFiles


class WeightFilling:
    """How a model without memory is filled; made before its parameters have memory, and used after.

    Args:
        model: Built by `ModelHandle.load` as empty; it hands over its files.
    """

    def __init__(self, model: PackedModel) -> None:
        assert model.files is not None, "not built empty"
        self._model = model
        self._files, model.files = model.files, None
        self._shapes = {name: parameter.shape for name, parameter in model.model.named_parameters()}
        self._buffers = dict(model.named_buffers())  # memory that is given may make others

    @torch.no_grad()
    def fill(self, part_of: Callable[[nn.Parameter], TensorRange], device: torch.device) -> None:
        """Read what this rank holds of each parameter.

        Nothing is sent between ranks. A parameter that transformers converts, such as a layer's experts from a tensor
        each, is made whole on the CPU, one at a time; of all others a rank reads its range.

        Args:
            part_of: What this rank holds of a parameter.
            device: Of buffers.

        Raises:
            UserError: A file is broken.
        """
        model = self._model.model
        of_name = {plain_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}
        read, converted = _sources(model, self._files, of_name)
        filled: set[nn.Parameter] = set()
        for first, conversion in converted.items():
            for name, made in conversion.convert(first, model=model, config=model.config).items():
                _cut(made[0] if isinstance(made, list) else made, part_of(of_name[name]))
                filled.add(of_name[name])
                del made
        for name, parameter in of_name.items():
            if name in read and parameter not in filled:
                self._files.read(read[name], part_of(parameter))
                filled.add(parameter)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                _cut(first_values(name, self._shapes[name]), part_of(parameter))
            elif parameter not in filled:
                assert self._model.new_head, name  # anything else that is missing was refused
                part_of(parameter).values.zero_()
        for name, buffer in self._buffers.items():
            owner, _, key = name.rpartition(".")
            source = read.get(self._model.hf_name(name))
            value = buffer if source is None else self._files.whole(source, of_buffer=True).to(buffer.dtype)
            self._model.get_submodule(owner)._buffers[key] = value.to(device)


def _sources(
    model: Any, files: WeightFiles, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Where each parameter or buffer comes from: a tensor of the files by name, or transformers' conversion of several.

    As `convert_and_load_state_dict_in_model` of transformers does it, which loads models whole.
    """
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    known = dict.fromkeys(map(plain_name, model.state_dict()), True)
    converters = [each for each in model._weight_conversions if isinstance(each, WeightConverter)]
    renamings = [each for each in model._weight_conversions if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    read: dict[str, str] = {}
    converted: dict[str, Any] = {}
    for key in sorted(files.names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        if name not in known:
            continue
        if pattern is None:
            read[name] = key
        else:
            conversion = converted.setdefault(name, deepcopy(by_pattern[pattern]))
            conversion.add_tensor(name, key, pattern, partial(_whole, files, key, parameters[name].dtype))
    return read, converted


def _whole(files: WeightFiles, name: str, dtype: torch.dtype) -> Tensor:
    return files.whole(name).to(dtype)


def _cut(whole: Tensor, part: TensorRange) -> None:
    """Write a part's range of a whole tensor into it."""
    part.values.copy_(whole.reshape(-1)[part.start : part.start + part.values.numel()])
