"""What goes over the wire, counted at the process group: every collective and message of this process.

``bench.py traffic`` counts one training step, and the waits of the host for the device in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.parallel.gloo import DirectAllGather, DirectReduceScatter
from fsdp2kit.torch_compat import TorchDispatchMode, group_named


@dataclass
class Traffic:
    """Calls by kind, and the bytes that this rank sent to others; a ring algorithm is assumed for all-reduce."""

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
def count_traffic() -> Iterator[Traffic]:
    """While it is open, everything that this process's groups send is counted; not thread-safe.

    FSDP's own collectives over gloo, which are made of messages (`fsdp2kit.parallel.gloo`), count as what they are.
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
        "allgather": ("all_gather", lambda group, _, mine, *__: (group.size() - 1) * mine[0].nbytes),
    }
    made_of_messages: dict[type, tuple[str, Callable[..., int]]] = {
        DirectAllGather: ("all_gather", _gathered_by_messages),
        DirectReduceScatter: ("reduce_scatter", _scattered_by_messages),
    }
    inside = _Inside()
    with ExitStack() as patches:
        for name in counters.keys() & vars(dist.ProcessGroup).keys():
            patches.enter_context(_counting(dist.ProcessGroup, name, *counters[name], traffic, inside))
        for kind, counter in made_of_messages.items():
            patches.enter_context(_counting(kind, "__call__", *counter, traffic, inside))
        patches.enter_context(_FunctionalCollectives(traffic))
        yield traffic


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


@dataclass
class _Inside:
    """Whether what is called now is part of something that has been counted."""

    now: bool = False


@contextmanager
def _counting(
    owner: type, name: str, kind: str, size: Callable[..., int], traffic: Traffic, inside: _Inside
) -> Iterator[None]:
    """While it is open, calls of this method are counted, but not those that they make themselves."""
    # As the class holds it, for what getattr returns would no longer bind to an instance when set again.
    held, method = vars(owner)[name], getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if inside.now:
            return method(*arguments, **named)
        traffic.add(kind, size(*arguments, **named))
        inside.now = True
        try:
            return method(*arguments, **named)
        finally:
            inside.now = False

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, held)


def _gathered(group: Any, result: Tensor, mine: Tensor, *_: Any) -> int:
    return (group.size() - 1) * mine.nbytes


def _scattered(group: Any, mine: Tensor, whole: Tensor, *_: Any) -> int:
    return (group.size() - 1) * mine.nbytes


def _gathered_by_messages(
    _: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
) -> int:
    return _gathered(group, output_tensor, input_tensor)


def _scattered_by_messages(
    _: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
) -> int:
    return _scattered(group, output_tensor, input_tensor)


def _exchanged(group: Any, result: Tensor, whole: Tensor, receive: list[int], send: list[int], *_: Any) -> int:
    kept = send[group.rank()] if send else whole.shape[0] // group.size()
    return (whole.shape[0] - kept) * (whole.nbytes // whole.shape[0])


def _reduced(group: Any, tensors: list[Tensor], *_: Any) -> int:
    return sum(2 * (group.size() - 1) * tensor.nbytes // group.size() for tensor in tensors)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py traffic``."""
    strategies = get_args(FSDPConfig.model_fields["strategy"].annotation)
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face directory; weights are random (a small Llama)")
    parser.add_argument("--strategy", choices=strategies, default="full_shard", help="of sharding (full_shard)")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a rank and step (2)")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens a row (64)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    from fsdp2kit.bench.step_traffic import Options, bench_traffic, traffic_lines  # which imports this file

    result = bench_traffic(Options(options.model, options.strategy, options.micro_batches, options.seq_len))
    return result, traffic_lines(result)
