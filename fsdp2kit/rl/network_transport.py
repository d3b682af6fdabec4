"""A process group of a trainer's rank 0 and a server's workers, apart from every other group that these have.

The trainer opens a `Meeting` and tells the server its `place`, over HTTP. Each worker joins there: vLLM's, which have
this module, say how many they are; SGLang's join by torch's own means. The group is gloo's, or NCCL's where all of
them have a CUDA device. It is made anew for each update of weights, so one that broke is never used again.

This module runs in the server's environment too, and imports nothing else of this package.
"""

from __future__ import annotations

import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_POLL = 0.02
"""Seconds between looks at the store."""
_ENVIRONMENT = threading.Lock()
"""Held while a variable has another value: groups of several servers are made at the same time."""
_REASON = 2.0
"""Seconds that a server has to say why a broadcast broke off."""


class LinkError(RuntimeError):
    """The group was not made in time, or it broke."""


class Place(TypedDict):
    """Where workers join, in JSON."""

    address: str
    """The trainer's, as the server reaches it."""
    port: int
    seconds: float
    """How long each side waits for the other one."""


def own_address(host: str, port: int = 9) -> str:
    """This machine's address on the way to a host. Nothing is sent.

    Raises:
        OSError: the host is not known, or there is no way to it.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def is_here(host: str) -> bool:
    """Whether a name or an address is this machine's: a socket can be bound to it. False where it is not known."""
    with suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(where)
                return True
    return False


def in_background(work: Callable[[], T]) -> Future[T]:
    """Call ``work`` in a thread that does not keep the process from ending."""
    future: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:  # a new thread begins with the first one
                torch.cuda.set_device(device)
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Link:
    """One side of the group. Rank 0 is the trainer, which sends; the others receive."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        backend: str,
        address: str,
        device: torch.device,
        seconds: float,
    ) -> None:
        """
        Args:
            store: all sides use it under the same prefix.
            backend: ``"gloo"`` or ``"nccl"``.
            address: this machine's, on which gloo listens; NCCL chooses its own way.
            device: of the data.
            seconds: limit of each wait for another side.

        Raises:
            LinkError: a side did not come in time.
        """
        self._store = store
        self._device = device
        self._backend = backend
        limit = timedelta(seconds=seconds)
        try:
            self._group = (
                _nccl(store, rank, size, limit) if backend == "nccl" else _gloo(store, rank, size, limit, address)
            )
        except (RuntimeError, ValueError) as error:
            raise LinkError(_plain(error)) from None

    def broadcast(self, *tensors: Tensor) -> None:
        """Send tensors from rank 0, or receive them elsewhere; returns when their memory may be used again.

        Args:
            tensors: contiguous, on the link's device, each of the same size in bytes on all ranks.

        Raises:
            LinkError: another side is gone, or did not answer in time.
        """
        outgoing = [one.cpu() if self._backend == "gloo" else one for one in tensors]
        group = self._group  # until its work has ended: the end of a group waits for that
        try:
            for work in [group.broadcast(one, 0) for one in outgoing]:
                work.wait()
        except RuntimeError as error:
            raise LinkError(_plain(error)) from None
        for one, sent in zip(tensors, outgoing, strict=True):
            if sent is not one:
                one.copy_(sent)

    def end(self, seconds: float) -> None:
        """Leave the group when all that was sent has arrived; all sides do so at the same time.

        Args:
            seconds: after these it is left as `close` does.
        """
        if self._backend == "nccl":  # what it still sends would be lost, and the other sides wait for this one
            group = self._group
            wait([in_background(group.shutdown)], timeout=seconds)
        self.close()

    def close(self) -> None:
        """Leave the group, whatever is under way."""
        group = self._group
        self._group = None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()


class Meeting:
    """Where the trainer waits for the server's workers.

    Args:
        host: the server's.
        seconds: how long to wait, here and in each later wait for another side.

    Raises:
        LinkError: there is no way to the host.
    """

    def __init__(self, host: str, seconds: float) -> None:
        limit = timedelta(seconds=seconds)
        try:
            address = own_address(host)
            # On this address alone, not on all that the machine has. The store closes the socket.
            listening = socket.create_server(
                (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
            )
            port = listening.getsockname()[1]
            self._store = dist.TCPStore(
                address,
                port,
                is_master=True,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise LinkError(_plain(error)) from None
        self.place = Place(address=address, port=port, seconds=seconds)

    def join(self, device: torch.device, still: Callable[[], object]) -> Link:
        """Wait for all workers, and make the group.

        Args:
            still: called again and again; what it raises ends the wait.

        Raises:
            LinkError: not all came in time.
        """
        deadline = time.monotonic() + self.place["seconds"]
        self._wait_for(["worker 0"], deadline, still)
        count = int(self._store.get("worker 0").split()[0])
        workers = [f"worker {number}" for number in range(count)]
        self._wait_for(workers, deadline, still)
        kinds = {self._store.get(name).split()[1].decode() for name in workers}
        backend = "nccl" if kinds == {"cuda"} and device.type == "cuda" else "gloo"
        self._store.set("backend", backend)
        return self._link(dist.PrefixStore("weights", self._store), count, backend, device)

    def join_by_name(
        self, device: torch.device, still: Callable[[], object], *, name: str, workers: int, backend: str
    ) -> Link:
        """Make the group with workers that make theirs as SGLang does: by `torch.distributed`, under a name.

        Args:
            still: called again and again; what it raises ends the wait.

        Raises:
            LinkError: not all came in time.
        """
        # SGLang puts the group's name before all keys; torch puts it there again, then the backend's first device.
        kind = "cuda" if backend == "nccl" else "cpu"
        store = dist.PrefixStore(f"{kind}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, self._store)))
        link = in_background(lambda: self._link(store, workers, backend, device))
        while not wait([link], timeout=_POLL).done:
            still()
        return link.result()

    def _link(self, store: dist.Store, workers: int, backend: str, device: torch.device) -> Link:
        options: dict[str, Any] = {"address": self.place["address"], "seconds": self.place["seconds"]}
        return Link(store, 0, 1 + workers, backend=backend, device=device, **options)

    def _wait_for(self, workers: list[str], deadline: float, still: Callable[[], object]) -> None:
        while not self._store.check(workers):
            still()
            if time.monotonic() > deadline:
                missing = ", ".join(name for name in workers if not self._store.check([name]))
                raise LinkError(f"{missing} did not come within {self.place['seconds']:g} seconds")
            time.sleep(_POLL)


class NetworkSender:
    """Gives buckets to a server's workers, as one update of its weights.

    A bucket's memory is used again once it is sent; the server loads it while the next one is gathered.

    Args:
        host: the server's.
        seconds: limit of each wait for a worker; the server has twice as long to load a bucket.
        invite: asks the server to join at a place, for data on a device; it returns when all workers have.
        announce: tells the server what comes next, and returns when it is loaded.
        join: makes the group at a `Meeting`; `Meeting.join` or `Meeting.join_by_name`.
    """

    def __init__(
        self,
        host: str,
        seconds: float,
        *,
        invite: Callable[[Place, torch.device], object],
        announce: Callable[[dict[str, Any]], object],
        join: Callable[[Meeting, torch.device, Callable[[], object]], Link] = Meeting.join,
    ) -> None:
        self._host = host
        self._seconds = seconds
        self._invite = invite
        self._announce = announce
        self._join = join
        self._link: Link | None = None
        self._answer: Future[object] | None = None

    def send(self, tensors: Sequence[Tensor], told: dict[str, Any]) -> None:
        """Send a bucket; the first one makes the group.

        Args:
            tensors: contiguous ones of one device; each is a broadcast.
            told: what the server needs to know of them, for ``announce``.

        Raises:
            LinkError: a worker is gone, or did not answer in time.
            Exception: what ``invite`` or ``announce`` raises.
        """
        link = self._link = self._link or self._meet(tensors[0].device)
        self.settle()
        answer = self._answer = in_background(lambda: self._announce(told))
        sent: Future[object] = in_background(lambda: link.broadcast(*tensors))
        wait([sent, answer], return_when=FIRST_COMPLETED)
        if sent.done() and sent.exception() is not None:
            wait([answer], timeout=_REASON)
        if answer.done():
            answer.result()
        sent.result()

    def _meet(self, device: torch.device) -> Link:
        meeting = Meeting(self._host, self._seconds)
        answer = in_background(lambda: self._invite(meeting.place, device))
        link = self._join(meeting, device, lambda: answer.result() if answer.done() else None)
        self._answer = answer
        return link

    def settle(self) -> None:
        """Wait until the server has loaded what was sent.

        Raises:
            LinkError: it did not answer in time.
            Exception: what ``announce`` raises.
        """
        if self._answer is not None:
            if not wait([self._answer], timeout=2 * self._seconds).done:
                raise LinkError(f"no answer within {2 * self._seconds:g} seconds")
            self._answer.result()

    def end(self) -> None:
        """Leave the group when all that was sent has arrived; the server's workers leave it at the same time."""
        if self._link is not None:
            self._link.end(self._seconds)

    def close(self) -> None:
        """Leave the group, whatever is under way."""
        if self._link is not None:
            self._link.close()


def join(place: Place, *, number: int, count: int, device: torch.device) -> Link:
    """Join a trainer as one of a server's workers.

    Args:
        number: this worker's, from 0 on.
        count: of all workers.
        device: of its weights.

    Raises:
        LinkError: the trainer cannot be reached, or another worker did not come in time.
    """
    seconds = place["seconds"]
    limit = timedelta(seconds=seconds)
    try:
        store = dist.TCPStore(place["address"], place["port"], is_master=False, timeout=limit, wait_for_workers=False)
        store.set(f"worker {number}", f"{count} {device.type}")
        backend = store.get("backend").decode()
        address = own_address(place["address"], place["port"])
    except (OSError, RuntimeError) as error:
        raise LinkError(f"the trainer at {place['address']}:{place['port']}: {_plain(error)}") from None
    shared = dist.PrefixStore("weights", store)
    return Link(shared, number + 1, count + 1, backend=backend, address=address, device=device, seconds=seconds)


class NetworkReceiver:
    """Takes the buckets of a `NetworkSender`, as one of a server's workers.

    Args:
        place, number, count, device: as `join` takes them.

    Raises:
        LinkError: as `join` does.
    """

    def __init__(self, place: Place, *, number: int, count: int, device: torch.device) -> None:
        self._link = join(place, number=number, count=count, device=device)
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def receive(self, entries: list[list[Any]], nbytes: int) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of a bucket; each tensor may be kept.

        Memory holds a bucket and the tensors that are kept; one that comes alone is not copied.

        Args:
            entries: ``[name, shape, dtype's name, first byte]`` of each tensor.
            nbytes: of the bucket.

        Raises:
            LinkError: the trainer is gone, or did not send in time. The group is left.
        """
        if is_alone := len(entries) == 1:
            data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        else:
            if len(self._buffer) < nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            data = self._buffer[:nbytes]
        try:
            self._link.broadcast(data)
        except LinkError:
            self.close()
            raise
        for name, shape, dtype, offset in entries:
            kind = getattr(torch, dtype)
            flat = data[offset : offset + math.prod(shape) * kind.itemsize]
            tensor = flat.view(kind).view(shape)
            yield name, tensor if is_alone else tensor.clone()

    def close(self) -> None:
        """Leave the group."""
        self._link.close()


# Groups beside the default one have no public constructor in torch, but for the classes of their backends. Their
# options have private names, which are used here and not from `torch_compat`: that is the trainer's alone.
def _gloo(store: dist.Store, rank: int, size: int, limit: timedelta, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # By itself it listens where this machine's name leads, which may be no way to the other side.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _ENVIRONMENT:
        before = os.environ.get(name)
        # The constructor reads it: a wait raises after the limit. Without it NCCL's watchdog would end the process.
        os.environ[name] = "1"
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _plain(error: BaseException) -> str:
    """The first line of an error of torch, without the place in its sources.

    A run takes an error that names such a place for a lost rank of its own.
    """
    text = next(iter(str(error).splitlines()), "") or repr(error)
    text = re.sub(r"\[[^\]\s]*\.(cc|cpp|h|hpp):\d+\]\s*", "", text)
    return text.partition(". This is typically")[0]
