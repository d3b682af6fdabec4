"""Weights to an engine in another process, by network: buckets beside one `full_tensor` after another."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp2kit.bench.harness import PeakMemory, Task, run_sides, task_rows
from fsdp2kit.bench.sides import bench_config
from fsdp2kit.bench.storage import llama_config
from fsdp2kit.job.distributed import World, gather_objects
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.rl.checksums import checksum, is_chosen
from fsdp2kit.rl.engine import Bucket, VersionedWeights
from fsdp2kit.rl.network_transport import Link, Meeting, NetworkReceiver, NetworkSender, in_background, join
from fsdp2kit.rl.weight_sync import sync_weights

_SECONDS = 300.0


def bench_sync(world: World, *, params: float = 0.5, bucket_mib: int = 16, rounds: int = 5) -> dict[str, Any]:
    """Weights in bfloat16 to another process by network, in buckets and one by one, in turns. Every rank calls this.

    Both make a group of their own in each round, and copy into weights that are there. One by one, every rank gathers
    a parameter with `full_tensor` and casts it, and rank 0 broadcasts it. With buckets, checksums are compared too.

    Args:
        params: size of the model, in 10^9 parameters.
        bucket_mib: MiB of a bucket.
        rounds: syncs of each kind.
    """
    section = {"weights": "random", "attention": "sdpa", "config": llama_config(params * 1e9).to_diff_dict()}
    model: Any = Sharded(bench_config({"model": section, "fsdp": {"param_dtype": "float32"}}), world=world).model
    parameters = dict(model.named_parameters())
    with _receiver({name: list(one.shape) for name, one in parameters.items()}, world) as ask:
        engine = _Engine(ask, world)
        way = {"dtype": torch.bfloat16, "bucket_mib": bucket_mib}
        sides = {
            "fsdp2kit": Task(lambda: sync_weights(model, engine, version=1, **way)),
            "full_tensor": Task(lambda: _one_by_one(parameters, ask, world)),
        }
        found = run_sides(sides, rounds=rounds, warmup=1, world=world)
        peaks = ask("peaks") if world.is_main else None
        equal = []
        for name, sent in _wholes(parameters):
            equal.append(not world.is_main or ask("sum", name) == checksum(sent))
    rows = task_rows(found)
    for row, peak in zip(rows, gather_objects(peaks)[0].values(), strict=True):
        row["receiver_peak_bytes"] = peak
    largest = max(one.numel() for one in parameters.values()) * 2
    bound = {"name": "bound", "peak_bytes": 2 * bucket_mib * 2**20 + largest}  # two buckets and the largest tensor
    return {
        "rows": [*rows, bound],
        "checks": {"values_equal": all(equal)},
    }


def _wholes(parameters: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, one in parameters.items():
        yield name, one.detach().full_tensor().bfloat16()


class _Engine(VersionedWeights):
    """As the client of a vLLM server, with a pipe in place of HTTP."""

    def __init__(self, ask: Any, world: World) -> None:
        self._ask, self._is_main = ask, world.is_main

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        self._sums: dict[str, Any] = {}
        if self._is_main:
            self._ask("begin", "fsdp2kit")
            invite, announce = (lambda place, _: self._ask("meet", place)), (lambda told: self._ask("bucket", told))
            self._sender = NetworkSender("127.0.0.1", _SECONDS, invite=invite, announce=announce)

    def load_weights(self, bucket: Bucket) -> None:
        if self._is_main:
            entries = [[one.name, one.shape, str(one.dtype)[6:], one.offset] for one in bucket.entries]
            self._sender.send([bucket.data], {"entries": entries, "nbytes": len(bucket.data)})
            self._sums |= {name: checksum(one) for name, one in bucket.tensors() if is_chosen(name, 1)}

    def finish_update(self, version: int) -> None:
        if self._is_main:
            self._sender.settle()
            self._sender.close()
            assert self._ask("end", self._sums)
        super().finish_update(version)


def _one_by_one(parameters: dict[str, Any], ask: Any, world: World) -> None:
    """Gather a tensor, send it, and go on to the next one."""
    link, answer = None, None
    if world.is_main:
        ask("begin", "full_tensor")
        meeting = Meeting("127.0.0.1", _SECONDS)
        answer = in_background(lambda: ask("tensors", meeting.place))
        link = meeting.join(world.device, lambda: None)
    for _, tensor in _wholes(parameters):
        if link is not None:
            link.broadcast(tensor.view(-1).view(torch.uint8))
    if link is not None and answer is not None:
        answer.result()
        link.close()
        ask("end", {})


@contextlib.contextmanager
def _receiver(shapes: dict[str, list[int]], world: World) -> Iterator[Any]:
    """A process beside rank 0, and a function that has it do something; a function of no use on the other ranks."""
    if not world.is_main:
        yield lambda *_: None
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, shapes, str(world.device)), daemon=True)
    process.start()

    def ask(*question: Any) -> Any:
        ours.send(question)
        return ours.recv()

    try:
        yield ask
    finally:
        process.kill()
        process.join()


def _serve(connection: Any, shapes: dict[str, list[int]], name: str) -> None:
    """Answer questions, one after the other."""
    torch.set_num_threads(1)
    device = torch.device(name)
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    peaks: dict[str, int] = {}
    memory = PeakMemory(device)
    side, link, receiver = "", None, None
    while True:
        kind, *rest = connection.recv()
        answer: Any = None
        if kind == "begin":
            side, memory = rest[0], PeakMemory(device)
            memory.__enter__()
        elif kind == "meet":
            receiver = NetworkReceiver(rest[0], number=0, count=1, device=device)
        elif kind == "bucket" and receiver is not None:
            for key, tensor in receiver.receive(**rest[0]):
                weights[key].copy_(tensor)
        elif kind == "tensors":
            link = join(rest[0], number=0, count=1, device=device)
            _receive_each(link, weights)
        elif kind == "end":
            answer = all(checksum(weights[key]) == one for key, one in rest[0].items())
            receiver = link = None
            memory.__exit__(None, None, None)
            peaks[side] = max(peaks.get(side, 0), memory.peak or 0)
        elif kind == "sum":
            answer = checksum(weights[rest[0]])
        elif kind == "peaks":
            answer = peaks
        connection.send(answer)


def _receive_each(link: Link, weights: dict[str, Tensor]) -> None:
    for one in weights.values():
        data = torch.empty(one.nbytes, dtype=torch.uint8, device=one.device)
        link.broadcast(data)
        one.copy_(data.view(one.dtype).view(one.shape))
    link.close()
