"""Modules without what was put around them: adapters, weights in 4 bits, and the classes of `fully_shard`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdp2kit.weights.adapters import base_name
from fsdp2kit.weights.record import own_class, weights_of


class PackedModule(nn.Module):
    """A module that keeps its frozen weights in another form than the model's files have them (in 4 bits)."""

    def plain(self) -> nn.Module:
        """The module as it was; those weights have no storage."""
        raise NotImplementedError

    def fills(self) -> dict[str, Callable[[Any], None]]:
        """What fills each of those weights from its values (sliceable, of any floating-point dtype), by its name."""
        raise NotImplementedError

    def unpacked_rows(self) -> tuple[Tensor, Tensor, int]:
        """Of a linear layer: the stored parameter, this rank's rows of the weight, and how many a stored row has."""
        raise NotImplementedError


def base_module(module: nn.Module) -> nn.Module:
    """The model's own module, if peft has put an adapter or a copy that is trained whole around it."""
    for inner, beside in (("base_layer", "lora_A"), ("original_module", "modules_to_save")):
        if {inner, beside} <= module._modules.keys():
            return base_module(module.get_submodule(inner))  # experts have two wrappers
    return module


def base_tensors(model: nn.Module) -> dict[str, list[Tensor]]:
    """Parameters and persistent buffers by their names without adapters; two of a module that is trained whole.

    A weight in 4 bits is there as it is stored; see `packed_weights`.
    """
    found: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if (inner := base_name(re.sub(r"\.nf4$", ".weight", name))) is not None:
            found.setdefault(inner, []).append(tensor)
    return found


def packed_weights(model: nn.Module) -> dict[str, Callable[[Any], None]]:
    """What fills each weight that is stored in 4 bits from its values, by the weights' names without adapters."""
    found: dict[str, Callable[[Any], None]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            found |= {f"{name}.{weight}": fill for weight, fill in module.fills().items()}
    return {base_name(name) or name: fill for name, fill in found.items()}


def build_skeleton(module: nn.Module, made: dict[nn.Module, nn.Module] | None = None) -> Any:
    """A shallow copy of the module and those in it, of the classes they had before `fully_shard`, on meta.

    Adapters inside the module are left out, and layers in 4 bits become plain ones. Non-persistent buffers, which hold
    computed values, are copied. A tensor under two names becomes two tensors, as in transformers before it ties them;
    a module in two places stays one.
    """
    made = {} if made is None else made
    if module in made:
        return made[module]
    if isinstance(module, PackedModule):
        made[module] = build_skeleton(module.plain(), made)
        return made[module]
    copied: Any = object.__new__(own_class(module))
    made[module] = copied
    copied.__dict__.update(module.__dict__)
    copied._parameters = {
        name: p if p is None else nn.Parameter(_meta(p), requires_grad=p.is_floating_point())
        for name, p in module._parameters.items()
    }
    copied._buffers = {
        name: b if b is None else (b.clone() if name in module._non_persistent_buffers_set else _meta(b))
        for name, b in module._buffers.items()
    }
    children = module._modules.items()
    copied._modules = {name: child and build_skeleton(base_module(child), made) for name, child in children}
    return copied


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def cast_model(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model's tensors the dtypes that ``from_pretrained(dtype=dtype)`` gives them, in place."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, wanted in weights_of(model).dtypes(dtype).items():
        if name in tensors:
            tensors[name].data = tensors[name].data.to(wanted)
