"""Random values for a sharded model, as functions of the seed and of names alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.torch_compat import tree_leaves
from fsdp2kit.weights.adapter_values import fill_adapter
from fsdp2kit.weights.modules import base_tensors, build_skeleton, packed_weights
from fsdp2kit.weights.record import find_ties
from fsdp2kit.weights.seeds import seed_by_name, unset
from fsdp2kit.weights.shards import copy_part


def initialize(model: PreTrainedModel, *, seed: int) -> None:
    """Fill a materialised (sharded) model, and adapters on it, with values that depend on the seed and on names alone.

    The distribution is the model's own (``_init_weights``), the same on any mesh. Every rank calls it with the
    same seed.
    """
    # transformers calls ``_init_weights`` on every module, children first. What a call changes depends on the
    # architecture: the module's tensors, its children's (ModernBERT), even all of the model's. So the calls get a
    # skeleton on meta instead of the sharded model. Its parts are made real in turn, whole, on the CPU, and every rank
    # copies its shards. A part is a module's own tensors if no other call changes them, otherwise the smallest module
    # that holds everything its calls change.
    skeleton = build_skeleton(model)
    targets = base_tensors(model)
    quantized = packed_weights(model)
    wanted = targets.keys() - find_ties(model).keys()
    calls = list(_init_calls(skeleton, "", skeleton, set()))
    for name, recurse in _parts(skeleton, calls):
        part = skeleton.get_submodule(name)
        prefix = name and f"{name}."
        if wanted.isdisjoint(_tensors_of(part, prefix, recurse=recurse)):  # a tied parameter's other name
            continue
        # NaN shows what an initialisation leaves out.
        part._apply(unset, recurse=recurse)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for call in calls:
                if call.name == name or (recurse and call.name.startswith(prefix)):
                    seed_by_name(seed, call.name)
                    call.owner._init_weights(call.module)
        values = _tensors_of(part, prefix, recurse=recurse)
        for key in sorted(wanted & values.keys()):
            if values[key].isnan().any():
                what = f'"random", but the initialisation of {type(skeleton).__name__} leaves {key} out'
                raise UserError("model.weights", what, "start from a checkpoint of this architecture")
            if key in quantized:
                quantized[key](values[key])
                continue
            for target in targets[key]:
                copy_part(target, values[key])
        done = {id(value) for value in values.values()}
        part._apply(lambda tensor, done=done: tensor.to("meta") if id(tensor) in done else tensor, recurse=recurse)
    fill_adapter(model, seed=seed)


def _tensors_of(part: nn.Module, prefix: str, *, recurse: bool) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers, or only its own, by their names in the model."""
    tensors = part.state_dict(prefix=prefix, keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if recurse or "." not in name.removeprefix(prefix)}


class _InitCall(NamedTuple):
    """One call of ``_init_weights``."""

    name: str
    """The name of the module; it seeds the call."""
    module: nn.Module
    owner: PreTrainedModel
    """The innermost model around the module; its ``_init_weights`` is the one to call."""


def _init_calls(module: nn.Module, name: str, owner: PreTrainedModel, seen: set[nn.Module]) -> Iterator[_InitCall]:
    """Every module in the order in which transformers initialises them: children first."""
    if module in seen:
        return
    seen.add(module)
    for key, child in module.named_children():
        of_child = child if isinstance(child, PreTrainedModel) else owner
        yield from _init_calls(child, f"{name}.{key}" if name else key, of_child, seen)
    yield _InitCall(name, module, owner)


class _Touched(TorchFunctionMode):
    """Notes every tensor that is an argument of a torch function.

    Functions are noted, not operations: torch's truncated normal runs none on a tensor on meta. A write through a view
    is noted when the view is made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids.update(id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))


def _parts(skeleton: PreTrainedModel, calls: list[_InitCall]) -> list[tuple[str, bool]]:
    """The parts of `initialize`: names of modules, and whether a part has the modules inside it, too."""
    tensors = skeleton.state_dict(keep_vars=True)
    owners = {id(tensor): name.rpartition(".")[0] for name, tensor in tensors.items()}
    with_own = set(owners.values())
    whole = set()
    own = set()
    for call in calls:
        # transformers has already initialised this model on meta, so this cannot fail.
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _Touched() as record:
            call.owner._init_weights(call.module)
        touched = {owners[tensor] for tensor in record.ids & owners.keys()}
        # A call may also replace its module's own tensors, which no record shows.
        if touched or call.name in with_own:
            paths = [name.replace(".", "/") for name in (call.name, *touched)]
            (whole if touched - {call.name} else own).add(PurePosixPath(os.path.commonpath(paths)))
    parts = [(part, True) for part in whole if whole.isdisjoint(part.parents)]
    parts += [(part, False) for part in own if whole.isdisjoint([part, *part.parents])]
    return [(".".join(part.parts), recurse) for part, recurse in sorted(parts)]
