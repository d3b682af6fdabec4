"""Random values as functions of (seed, module name), drawn by the model's own initialisation.

transformers calls ``_init_weights`` on every module, children first. What a call touches depends on the architecture:
the module's tensors, its children's (ModernBERT), even the whole model's. So it is never given the sharded model but a
skeleton: the same modules without FSDP, on meta. A first pass records which tensors each call touches; then each set
of tensors that some call touches together is made real, alone, and the calls that touch it are made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.torch_compat import tree_leaves


@dataclass(frozen=True)
class _Call:
    """One call of ``_init_weights``."""

    name: str
    """Of the module; it seeds the call."""
    module: nn.Module
    owner: PreTrainedModel
    """The innermost model around the module; its ``_init_weights`` is the one to call."""


def draw(model: PreTrainedModel, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """``(name, whole value on the CPU)`` of every parameter and persistent buffer, a tied one once.

    The distribution is the model's own. The values depend on seed and names alone, and are made one set of tensors
    at a time: for nearly all architectures the tensors of one module.

    Args:
        model: sharded or not, on any device; it is not changed.

    Raises:
        UserError: the architecture's initialisation leaves a parameter out.
    """
    skeleton = build_skeleton(model)
    calls = list(_calls(skeleton, "", skeleton, set()))
    slots = _slots(skeleton)
    wanted = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    for names, together in _together(calls, slots):
        if wanted.isdisjoint(names):  # a tied parameter's other name
            continue
        values = _run(together, {name: slots[name] for name in names}, seed=seed)
        for name in sorted(wanted.intersection(names)):
            if values[name].isnan().any():
                what = f'"random", but the initialisation of {type(skeleton).__name__} leaves {name} out'
                raise UserError("model.weights", what, "start from a checkpoint of this architecture")
            yield name, values[name]


def build_skeleton(module: nn.Module, made: dict[nn.Module, nn.Module] | None = None) -> Any:
    """A shallow copy of the module and those in it, of the classes they had before `fully_shard`, on meta.

    Non-persistent buffers, which hold computed values, are copied. A tensor under two names becomes two tensors, as
    it is in transformers before ties are made; a module in two places stays one.
    """
    made = {} if made is None else made
    if module in made:
        return made[module]
    twin: Any = object.__new__(next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule)))
    made[module] = twin
    twin.__dict__.update(module.__dict__)
    twin._parameters = {
        name: p if p is None else nn.Parameter(_meta(p), requires_grad=p.is_floating_point())
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: b if b is None else (b.clone() if name in module._non_persistent_buffers_set else _meta(b))
        for name, b in module._buffers.items()
    }
    twin._modules = {name: child and build_skeleton(child, made) for name, child in module._modules.items()}
    return twin


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _calls(module: nn.Module, name: str, owner: PreTrainedModel, seen: set[nn.Module]) -> Iterator[_Call]:
    """Every module in the order in which transformers initialises them: children first."""
    if module in seen:
        return
    seen.add(module)
    for key, child in module.named_children():
        of_child = child if isinstance(child, PreTrainedModel) else owner
        yield from _calls(child, f"{name}.{key}" if name else key, of_child, seen)
    yield _Call(name, module, owner)


def _slots(skeleton: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each parameter and persistent buffer is kept: a module's dictionary and the key in it, by name."""
    return {
        f"{prefix}.{key}" if prefix else key: (kept, key)
        for prefix, module in skeleton.named_modules()
        for kept in (module._parameters, module._buffers)
        for key, tensor in kept.items()
        if tensor is not None and key not in module._non_persistent_buffers_set
    }


def _together(
    calls: list[_Call], slots: dict[str, tuple[dict[str, Any], str]]
) -> Iterator[tuple[list[str], list[_Call]]]:
    """Sets of tensors that some call touches together, each with all calls that touch one of them, in order."""
    names = {id(kept[key]): name for name, (kept, key) in slots.items()}
    group_of: dict[str, tuple[set[str], set[int]]] = {name: ({name}, set()) for name in slots}
    for number, call in enumerate(calls):
        # Its own tensors belong to a call even where it swaps them for others, which no record shows.
        own = {f"{call.name}.{key}" if call.name else key for key in [*call.module._parameters, *call.module._buffers]}
        merged: tuple[set[str], set[int]] = (set(), {number})
        for name in (own & slots.keys()) | _touched(call, names):
            merged[0].update(group_of[name][0])
            merged[1].update(group_of[name][1])
        group_of.update(dict.fromkeys(merged[0], merged))
    groups = {id(group): group for group in group_of.values()}
    for tensors, numbers in groups.values():
        yield sorted(tensors), [calls[number] for number in sorted(numbers)]


class _Touched(TorchFunctionMode):
    """While it is active, notes every tensor that torch is asked anything about.

    On the level of functions, not of operations: torch's truncated normal, for one, looks at a tensor on meta and
    does nothing to it. Whoever writes through a view or an alias has asked the tensor for that first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids.update(id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))


def _touched(call: _Call, names: dict[int, str]) -> set[str]:
    """Names of the skeleton's tensors that a call reads or writes.

    What was built on meta was initialised there once already, by transformers, so this cannot fail.
    """
    record = _Touched()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), record:
        call.owner._init_weights(call.module)
    return {names[tensor] for tensor in record.ids & names.keys()}


def _run(calls: list[_Call], slots: dict[str, tuple[dict[str, Any], str]], *, seed: int) -> dict[str, Tensor]:
    """Make the calls with these tensors real, and return their values."""
    on_meta = {name: kept[key] for name, (kept, key) in slots.items()}
    for name, (kept, key) in slots.items():
        # NaN, so that what an initialisation leaves out cannot pass for a value.
        fill = float("nan") if on_meta[name].is_floating_point() else 0
        value = torch.full(on_meta[name].shape, fill, dtype=on_meta[name].dtype)
        is_parameter = isinstance(on_meta[name], nn.Parameter)
        kept[key] = nn.Parameter(value, requires_grad=on_meta[name].requires_grad) if is_parameter else value
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for call in calls:
            digest = hashlib.sha256(f"{seed}:{call.name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            call.owner._init_weights(call.module)
    values = {name: kept[key].detach() for name, (kept, key) in slots.items()}
    for name, (kept, key) in slots.items():
        kept[key] = on_meta[name]
    return values
