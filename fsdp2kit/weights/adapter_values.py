"""The values of a model's adapters: those of ``model.adapter``, or peft's first ones."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import local_part, sharded_like
from fsdp2kit.weights.adapter_files import adapter_files, from_adapter_files
from fsdp2kit.weights.adapters import ADAPTER, WEIGHTS_NAME, adapter_file_name, is_of_adapter
from fsdp2kit.weights.modules import PackedModule, base_module, build_skeleton
from fsdp2kit.weights.record import weights_of
from fsdp2kit.weights.seeds import seed_by_name, unset
from fsdp2kit.weights.shards import copy_part, copy_parts
from fsdp2kit.weights.stored import open_safetensors, some
from fsdp2kit.weights.transfer import MappingReader, WeightEntry, transfer


@torch.no_grad()
def fill_adapter(model: PreTrainedModel, *, seed: int) -> None:
    """Give the adapters of a materialised (sharded) model their first values; without adapters do nothing.

    The values are those of ``model.adapter``, or peft's initialisation of each layer, which depends on the seed and
    the layer's name alone, and for DoRA the lengths of the weight's rows. The model must have its weights. Collective.
    """
    adapter = weights_of(model).adapter
    tensors = model.state_dict()
    if adapter is not None and adapter.directory is not None:
        load_adapter(model, adapter.directory)
        return
    for name in () if adapter is None else adapter.layers:
        layer = build_skeleton(model.get_submodule(name))  # given the layer itself, it keeps the adapter
        for part in (layer.lora_A, layer.lora_B):
            part._apply(unset)
        with torch.random.fork_rng(devices=[]):
            seed_by_name(seed, name)
            layer.reset_lora_parameters(ADAPTER, True)
        for part in ("lora_A", "lora_B"):
            key = f"{part}.{ADAPTER}.weight"
            copy_part(tensors[f"{name}.{key}"], layer.get_parameter(key))
        lengths = tensors.get(f"{name}.lora_magnitude_vector.{ADAPTER}.weight")
        if lengths is not None:
            copy_part(lengths, _row_lengths(base_module(model.get_submodule(name))))


def _row_lengths(layer: Any) -> Tensor:
    """The lengths of all rows of a linear layer's stored weight, float32 ``[out]``. Collective."""
    if isinstance(layer, PackedModule):
        stored, rows, together = layer.unpacked_rows()
    else:
        stored = layer.weight
        rows = local_part(layer.weight)
        together = 1
    lengths = torch.linalg.norm(rows.float(), dim=1).view(-1, together)
    found: Any = sharded_like(stored, lengths, torch.Size((len(stored), together)))
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return whole.flatten()[: layer.out_features]


def load_adapter(model: PreTrainedModel, directory: str | Path) -> None:
    """Fill the adapters of a materialised (sharded) model from peft's ``adapter_model.safetensors``, in place."""
    # By name, not by `requires_grad`: a frozen copy of the model has adapters, too.
    targets = {name: tensor.detach() for name, tensor in model.named_parameters() if is_of_adapter(name)}
    skeleton = build_skeleton(model)
    path = Path(directory) / WEIGHTS_NAME
    todo = "give an adapter that was trained on this very model"
    if not path.is_file():
        raise UserError("model.adapter", f"{directory} has no {WEIGHTS_NAME}", todo)
    with open_safetensors([path]) as slices:
        found = [_entry(skeleton, name, target, slices) for name, target in targets.items()]
        wanted = {file: meta for entry in found for file, meta in entry.sources.items()}
        for where, names in (("the model", wanted.keys() - slices), ("the adapter", slices.keys() - wanted)):
            if names:
                raise UserError("model.adapter", f"{some(sorted(names))} only in {where} ({path})", todo)
        for file, expected in wanted.items():
            if (shape := slices[file].get_shape()) != list(expected.shape):
                what = f"{path}: {file} has shape {shape}, and the model wants {list(expected.shape)}"
                raise UserError("model.adapter", what, todo)
        transfer(found, MappingReader(slices), partial(copy_parts, targets))


def _entry(skeleton: PreTrainedModel, name: str, target: Tensor, stored: Collection[str]) -> WeightEntry:
    """From an adapter's file to one of the model's tensors. Factors of experts are all in one, as peft writes them, or
    in one each."""
    form = {name: torch.empty(target.shape, device="meta")}
    if (file := adapter_file_name(name, weights_of(skeleton).names)) in stored:
        return WeightEntry({file: form[name]}, form)
    return WeightEntry(adapter_files(skeleton, form), form, partial(from_adapter_files, skeleton, name, target.shape))
