"""Training state asleep: its memory moves to the host while an engine generates on the device, and back unchanged.

Storages move, not tensors: each is copied to the host and resized to nothing; on waking it grows again under the
tensors that view it. Parameters, shards, FSDP2's views of them and optimizer state stay the same objects.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.job.distributed import local_part
from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.torch_compat import accumulated_gradients, inner_tensors

logger = logging.getLogger(__name__)

Tag = Literal["weights", "optimizer"]
EVERYTHING: tuple[Tag, ...] = ("weights", "optimizer")
"""Parameters with their gradients; the optimizer's state."""


@dataclass(frozen=True)
class Moved:
    """What `sleep` or `wake_up` did."""

    nbytes: int
    """Bytes that went to the host or came back."""
    before: int
    """Bytes in use on the device: the allocator's on CUDA; on a CPU the process's resident memory, with the copies."""
    after: int


@dataclass
class _Asleep:
    """The memory of one tag while it is on the host."""

    copies: list[tuple[torch.UntypedStorage, Tensor]]
    """A storage that is empty now, and its bytes on the host."""
    undo: list[Callable[[], object]]
    """Removes the guards that refuse its use."""


def check_sleep(section: FSDPConfig) -> None:
    """Refuse offloaded parameters: they leave nothing to put to sleep."""
    if section.offload == "params":
        what = '"params" keeps parameters, gradients and optimizer state on the host already'
        raise UserError("fsdp.offload", what, 'set it to "none", and they are there only while the engine generates')


def sleep(model: nn.Module, optimizer: Optimizer | None, what: Collection[Tag] = EVERYTHING) -> Moved:
    """Move training state to the host and free its memory on the device; what sleeps already stays asleep.

    Until `wake_up`, a forward or an optimizer step raises `RunFailure`. Not collective.

    Args:
        model: sharded; units that a forward left gathered are freed.
        optimizer: with the state that is tagged ``"optimizer"``; None: there is none.
        what: ``"weights"`` is parameters and their gradients.
    """
    device, asleep = _device_of(model), _asleep_in(model)
    before, new = memory_in_use(device), list[_Asleep]()
    if "weights" in what and "weights" not in asleep:
        reshard_all(model)
        copies = _to_host(_weights_of(model), device)
        asleep["weights"] = _Asleep(copies, [*_guard_forward(model), *_guard_step(optimizer, "weights")])
        new.append(asleep["weights"])
    if "optimizer" in what and "optimizer" not in asleep and optimizer is not None:
        asleep["optimizer"] = _Asleep(_to_host(_state_of(optimizer), device), _guard_step(optimizer, "optimizer"))
        new.append(asleep["optimizer"])
    give_back_memory(device)
    return _moved("asleep", new, before, device)


def wake_up(model: nn.Module, what: Collection[Tag] = EVERYTHING) -> Moved:
    """Bring back to the device what `sleep` moved to the host; what is awake stays awake."""
    device, asleep = _device_of(model), _asleep_in(model)
    before, found = memory_in_use(device), [asleep.pop(tag) for tag in EVERYTHING if tag in what and tag in asleep]
    for one in found:
        for storage, copy in one.copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        for undo in one.undo:
            undo()
    return _moved("awake", found, before, device)


def check_awake(model: nn.Module) -> None:
    """Raise a RunFailure if the weights are asleep."""
    if "weights" in _asleep_in(model):
        raise RunFailure(_REFUSAL.format("weights"))


_REFUSAL = 'the {0} are asleep on the host; wake_up(model, ["{0}"]) brings them back'


def _asleep_in(model: nn.Module) -> dict[str, _Asleep]:
    return vars(model).setdefault("_fsdp2kit_asleep", {})


def _device_of(model: nn.Module) -> torch.device:
    """The device that a model computes on; offloaded parameters are refused."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            if parameter.device.type != parameter.device_mesh.device_type:
                check_sleep(FSDPConfig(offload="params"))
            return local_part(parameter).device
    return next(model.parameters()).device


def _weights_of(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from accumulated_gradients(module)


def _state_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """State as large as its parameter; a step count stays where it is."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)


def _to_host(tensors: Iterable[Tensor], device: torch.device) -> list[tuple[torch.UntypedStorage, Tensor]]:
    """Copy each storage under the tensors to the host once, and empty it; storages on other devices stay."""
    parts = [part for tensor in tensors for part in inner_tensors(tensor) if part.device == device]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
    copies = []
    for storage in (storage for storage in storages.values() if storage.nbytes()):
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
        copies.append((storage, copy.copy_(_bytes_of(storage), non_blocking=True)))
        storage.resize_(0)
    return copies


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _refuse(tag: Tag) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RunFailure(_REFUSAL.format(tag))

    return refuse


def _guard_forward(model: nn.Module) -> Iterator[Callable[[], object]]:
    """Refuse every call of a unit, also of the methods for which FSDP gathers parameters."""
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        yield module.register_forward_pre_hook(_refuse("weights"), prepend=True).remove
        # `register_fsdp_forward_method` keeps its methods only as bound methods on the instance.
        methods = {name: value for name, value in vars(module).items() if isinstance(value, MethodType)}
        vars(module).update(dict.fromkeys(methods, _refuse("weights")))
        yield partial(vars(module).update, methods)


def _guard_step(optimizer: Optimizer | None, tag: Tag) -> list[Callable[[], object]]:
    return [] if optimizer is None else [optimizer.register_step_pre_hook(_refuse(tag)).remove]


def give_back_memory(device: torch.device) -> None:
    """Free device memory that no tensor uses, for an engine in another process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def memory_in_use(device: torch.device) -> int:
    """Bytes in use: see `Moved`; 0 if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _moved(state: str, parts: Iterable[_Asleep], before: int, device: torch.device) -> Moved:
    nbytes, after = sum(copy.numel() for part in parts for _, copy in part.copies), memory_in_use(device)
    if nbytes:
        sizes = (value / 2**30 for value in (nbytes, before, after))
        logger.info("%s: %.2f GiB; memory in use %.2f, now %.2f GiB", state, *sizes)
    return Moved(nbytes, before, after)
