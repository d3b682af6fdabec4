"""A diagnosis when a device runs out of memory: what was allocated, and which keys to change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import RunFailure
from fsdp2kit.job.distributed import local_part
from fsdp2kit.planner.search import advise
from fsdp2kit.torch_compat import dump_memory_snapshot

# Share of memory that is reserved but unusable for the request from which fragmentation is mentioned.
_FRAGMENTED = 0.1

# The second is the older name, which torch reads too.
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Alive:
    """Bytes on the device, of this rank."""

    parameters: int
    gradients: int
    moments: int
    activations: int
    """What else is allocated: activations, gathered units and their gradients."""
    unused: int
    """What the allocator has reserved and not allocated."""
    total: int
    """Memory of the device."""


@contextlib.contextmanager
def explain_out_of_memory(
    config: TrainingConfig, model: nn.Module, optimizer: Optimizer, sizes: MeshSizes, *, rank: int
) -> Iterator[None]:
    """Around training: turn a device's out-of-memory error into a diagnosis, and write a memory snapshot.

    ``trace/oom-00000.pickle`` in the run directory opens in https://docs.pytorch.org/memory_viz; with
    ``profile.memory`` it has the history of the traced steps as well.
    """
    trace_dir = Path(config.run.dir) / "trace"
    try:
        yield
    except torch.OutOfMemoryError as error:
        alive = what_is_alive(model, optimizer)
        snapshot = trace_dir / f"oom-{rank:05d}.pickle"
        written = ""
        with contextlib.suppress(OSError):  # a full disk must not hide the diagnosis
            trace_dir.mkdir(parents=True, exist_ok=True)
            dump_memory_snapshot(str(snapshot))
            written = f" A snapshot is in {snapshot} (https://docs.pytorch.org/memory_viz)."
        reason = str(error).split(". ")[0]
        raise RunFailure(f"rank {rank}: {reason}. {diagnosis(alive, config, sizes)}{written}") from error


def what_is_alive(model: nn.Module, optimizer: Optimizer) -> Alive:
    """Count the bytes on this rank's device."""
    parameters = list(model.parameters())
    states = (value for state in optimizer.state.values() for value in state.values())
    device = torch.cuda.current_device()
    known = [_bytes_on_device(tensors) for tensors in (parameters, (p.grad for p in parameters), states)]
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return Alive(*known, activations=max(0, allocated - sum(known)), unused=reserved - allocated, total=total)


def _bytes_on_device(tensors: Iterable[object]) -> int:
    local = (local_part(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    return sum(tensor.nbytes for tensor in local if tensor.is_cuda)


def diagnosis(alive: Alive, config: TrainingConfig, sizes: MeshSizes) -> str:
    """One paragraph: what was allocated, and which keys to set next, the cheapest first."""
    parts = {
        "parameters": alive.parameters,
        "gradients": alive.gradients,
        "moments": alive.moments,
        "activations and gathered units": alive.activations,
    }
    listed = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in parts.items())
    text = f"Alive of {alive.total / 2**30:.0f} GiB: {listed}."
    if alive.unused > _FRAGMENTED * alive.total:
        text += f" {alive.unused / 2**30:.1f} GiB more were reserved in pieces too small"
        # Otherwise a segment never grows, and freed memory serves only requests that fit into its segment.
        settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR_SETTINGS).lower().replace(" ", "")
        grows = "expandable_segments:true" in settings
        text += "." if grows else f": start with {_EXPANDABLE} in the environment."
    kept = alive.parameters + alive.gradients + alive.moments
    advice = advise(config, sizes, saves="activations" if alive.activations >= kept else "state")
    return f"{text} Next: {'; '.join(advice)}."
