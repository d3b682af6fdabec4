"""Optimizer state in host memory: all of it, or all but the part that is being updated.

AdamW keeps two float32 moments a parameter, twice the memory of the shards themselves. Pinned host memory costs the
device only the time to move them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fsdp2kit.job.distributed import local_part, sharded_like

T = TypeVar("T")

# Elements of a rank's parameters whose state is on the device at once: 512 MiB of AdamW's moments.
ELEMENTS_AT_ONCE = 2**26


class HostState:
    """An optimizer's state in pinned host tensors, which are allocated once and reused."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: dict[tuple[Tensor, str], Tensor] = {}

    def to_host(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Move the state of these parameters (default: of all) to the host, and free it on the device.

        The copies may still be in progress: call `wait` before the host reads them.
        """
        for parameter, name, value in self._moments(parameters):
            local, key = local_part(value), (parameter, name)
            if key not in self._kept:
                self._kept[key] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._kept[key].copy_(local, non_blocking=True)
            self._optimizer.state[parameter][name] = sharded_like(value, self._kept[key])

    def to_device(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Copy the state of these parameters (default: of all) to the devices that the parameters are on."""
        for parameter, name, value in self._moments(parameters):
            local = local_part(value).to(parameter.device, non_blocking=True)
            self._optimizer.state[parameter][name] = sharded_like(value, local)

    def wait(self) -> None:
        """Return when all copies are complete."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _moments(self, parameters: Iterable[Tensor] | None) -> list[tuple[Tensor, str, Tensor]]:
        """State as large as its parameter; a step count stays where it is."""
        states = self._optimizer.state
        return [
            (parameter, name, value)
            for parameter in (states if parameters is None else parameters)
            for name, value in states[parameter].items()
            if isinstance(value, Tensor) and value.ndim
        ]


def keep_state_on_host(optimizer: Optimizer, *, elements_at_once: int = ELEMENTS_AT_ONCE) -> None:
    """Make ``optimizer.step`` work in batches of parameters: copy their state to the device, update, copy it back.

    The updates equal the optimizer's own bit for bit: each batch is a step in which the other parameters have no
    gradient. Call it before a schedule is built, because that wraps ``step`` too.

    Args:
        elements_at_once: elements of a batch, counted by the largest shard: an optimizer may communicate in each
            batch, so every rank must have the same ones.
    """
    whole_step = optimizer.step
    host = HostState(optimizer)

    def step(optimizer: Optimizer, closure: None = None) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = {parameter: parameter.grad for parameter in parameters}
        for parameter in parameters:
            parameter.grad = None
        for batch in in_batches(parameters, largest_shard, largest=elements_at_once):
            for parameter in batch:
                parameter.grad = gradients[parameter]
            host.to_device(batch)
            whole_step()
            host.to_host(batch)
            for parameter in batch:
                parameter.grad = None
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        host.wait()  # a checkpoint may read the host's copy from now on

    optimizer.step = MethodType(step, optimizer)


def largest_shard(tensor: Tensor) -> int:
    """Elements of the largest shard: the same number on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    sizes = list(tensor.shape)
    for placement, shards in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = -(-sizes[placement.dim] // shards)
    return math.prod(sizes)


def in_batches(items: Iterable[T], size_of: Callable[[T], int], *, largest: int) -> Iterator[list[T]]:
    """The items in lists whose sizes sum to ``largest`` at most, or of one item that is larger."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + size_of(item) > largest:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size_of(item)
    if batch:
        yield batch
