"""What goes over the wire, counted at the process group: every collective and message of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2kit.torch_compat import TorchDispatchMode, group_named


@dataclass
class Traffic:
    """Calls by kind, and the bytes that this rank sent to others.

    A ring algorithm is assumed for all-reduce; in a broadcast the source sends to each of the others.
    """

    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict, compare=False)
    """Bytes sent in the largest call of each kind."""

    @property
    def total(self) -> int:
        """Bytes sent in all."""
        return sum(self.sent.values())

    def add(self, kind: str, sent: int) -> None:
        """One more call."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent[kind] = self.sent.get(kind, 0) + sent
        self.largest[kind] = max(self.largest.get(kind, 0), sent)


@contextmanager
def count_traffic(*, functional: bool = True) -> Iterator[Traffic]:
    """While it is open, everything that this process's groups send is counted; not thread-safe.

    Args:
        functional: whether what DTensors send is counted. `torch.func` inside operators fails under that.
    """
    traffic = Traffic()
    # torch 2.13 renamed three of these; both names lead to the same function there.
    counters: dict[str, tuple[str, Callable[..., int]]] = {
        "send": ("send", lambda group, tensors, *_: sum(tensor.nbytes for tensor in tensors)),
        "_allgather_base": ("all_gather", _gathered),
        "all_gather_single": ("all_gather", _gathered),
        "_reduce_scatter_base": ("reduce_scatter", _scattered),
        "reduce_scatter_single": ("reduce_scatter", _scattered),
        "alltoall_base": ("all_to_all", _exchanged),
        "all_to_all_single": ("all_to_all", _exchanged),
        "allreduce": ("all_reduce", _reduced),
        "broadcast": ("broadcast", _broadcast),
        "allgather": ("all_gather", lambda group, _, mine, *__: (group.size() - 1) * mine[0].nbytes),
    }
    # As the class holds them, for what getattr returns would no longer bind to a group when set again.
    originals = {name: vars(dist.ProcessGroup)[name] for name in counters if name in vars(dist.ProcessGroup)}
    for name in originals:
        setattr(dist.ProcessGroup, name, _counting(getattr(dist.ProcessGroup, name), *counters[name], traffic))
    try:
        with _FunctionalCollectives(traffic) if functional else nullcontext():
            yield traffic
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


# Their kind, and how often the tensor that goes in travels: there and back again in a ring's all-reduce.
_FUNCTIONAL = {
    "_c10d_functional.all_reduce": ("all_reduce", 2),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 1),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 1),
    "_c10d_functional.all_to_all_single": ("all_to_all", 1),
}


class _FunctionalCollectives(TorchDispatchMode):
    """Counts what DTensors send: functional collectives go to the process group without passing through Python."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it is taken apart first, and its parts come here
        kind, share = _FUNCTIONAL.get(str(func.overloadpacket), (None, 0))
        if kind is not None:
            size = group_named(args[-1]).size()
            self._traffic.add(kind, (size - 1) * args[0].nbytes * share // (1 if kind == "all_gather" else size))
        return func(*args, **(kwargs or {}))


def _counting(original: Any, kind: str, size: Callable[..., int], traffic: Traffic) -> Callable[..., Any]:
    def call(group: Any, *arguments: Any, **named: Any) -> Any:
        traffic.add(kind, size(group, *arguments))
        return original(group, *arguments, **named)

    return call


def _gathered(group: Any, result: Tensor, mine: Tensor, *_: Any) -> int:
    return (group.size() - 1) * mine.nbytes


def _scattered(group: Any, mine: Tensor, whole: Tensor, *_: Any) -> int:
    return (group.size() - 1) * mine.nbytes


def _exchanged(group: Any, result: Tensor, whole: Tensor, receive: list[int], send: list[int], *_: Any) -> int:
    kept = send[group.rank()] if send else whole.shape[0] // group.size()
    return (whole.shape[0] - kept) * (whole.nbytes // whole.shape[0])


def _broadcast(group: dist.ProcessGroup, tensors: list[Tensor], options: dist.BroadcastOptions) -> int:
    others = group.size() - 1 if options.rootRank == group.rank() else 0
    return others * sum(tensor.nbytes for tensor in tensors)


def _reduced(group: Any, tensors: list[Tensor], *_: Any) -> int:
    return sum(2 * (group.size() - 1) * tensor.nbytes // group.size() for tensor in tensors)
