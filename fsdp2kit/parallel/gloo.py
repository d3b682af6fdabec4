"""FSDP's two collectives on CPU ranks, as messages from rank to rank.

gloo reduces and scatters by an all-reduce of a copy of everything, of which a rank keeps its part, and gathers through
buffers of its own. Here each rank sends every other just what that one needs, once. A sum is taken in the order of the
ranks, so that it is the same on every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from fsdp2kit.torch_compat import reduce_scatter_single


def exchange_directly(modules: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Let these units of FSDP on a CPU mesh gather parameters and reduce gradients by messages."""
    if mesh.device_type != "cpu" or mesh.size(mesh.ndim - 1) == 1:
        return
    gather: Any = DirectAllGather()  # torch's base classes of the two have no public name
    reduce: Any = DirectReduceScatter()
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)


class _Buffers:
    """New memory for each call, as FSDP2's own collectives have it."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor of ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)


class DirectAllGather(_Buffers):
    """What `FSDPModule.set_custom_all_gather` takes."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` ``[R · N]`` with every rank's ``input_tensor`` ``[N]``."""
        rank = group.rank()
        parts = output_tensor.view(group.size(), -1)
        with record_function("fsdp2kit::all_gather"):
            moves = [move for peer in _others(group) for move in _swap(input_tensor, parts[peer], peer, group)]
            if parts[rank].data_ptr() != input_tensor.data_ptr():
                parts[rank].copy_(input_tensor)
            for move in moves:
                move.wait()


class DirectReduceScatter(_Buffers):
    """What `FSDPModule.set_custom_reduce_scatter` takes."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum or average all ranks' ``input_tensor`` ``[R · N]``; ``output_tensor`` ``[N]`` is this rank's part.

        Args:
            op: a `torch.distributed.ReduceOp`; one that is neither SUM nor AVG is left to gloo.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)
            return
        parts = list(input_tensor.view(group.size(), -1))
        with record_function("fsdp2kit::reduce_scatter"):
            received = {peer: torch.empty_like(output_tensor) for peer in _others(group)}
            moves = [move for peer, part in received.items() for move in _swap(parts[peer], part, peer, group)]
            for move in moves:
                move.wait()
            received[group.rank()] = parts[group.rank()]
            first, second, *others = (received[rank] for rank in range(group.size()))
            torch.add(first, second, out=output_tensor)
            for part in others:
                output_tensor.add_(part)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(group.size())


def _others(group: ProcessGroup) -> list[int]:
    """The other ranks, beginning with the next, so that not all send to the same one first."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _swap(mine: Tensor, theirs: Tensor, peer: int, group: ProcessGroup) -> list[dist.Work]:
    """Send and receive, both under way."""
    moves = [
        dist.isend(mine, group=group, group_dst=peer),
        dist.irecv(theirs, group=group, group_src=peer),
    ]
    return [move for move in moves if move is not None]
