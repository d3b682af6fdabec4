"""What a rollout engine is, and what it is sent: buckets of named tensors, with a version."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fsdp2kit.checkpoint.safetensors_file import write_safetensors
from fsdp2kit.errors import RunFailure


@dataclass(frozen=True)
class Entry:
    """A tensor's place in a bucket."""

    name: str
    """As a Hugging Face file has it."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes before it in the bucket: a multiple of the dtype's size."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Bucket:
    """Whole tensors in one flat one, which is used again once they are loaded: whoever keeps one copies it."""

    entries: tuple[Entry, ...]
    data: Tensor
    """``[bytes]`` uint8, on the trainer's device."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each entry; the tensors are views of ``data``."""
        for entry in self.entries:
            flat = self.data[entry.offset : entry.offset + entry.nbytes]
            yield entry.name, flat.view(entry.dtype).view(entry.shape)


class VersionedWeights:
    """What an engine knows of the weights that it was sent; an engine derives from it and adds ``load_weights``.

    `sync_weights` calls ``begin_update(version)``, ``load_weights(bucket)`` for each bucket, and
    ``finish_update(version)``. Where one of them raises, on any rank, there is no version, and the next sync sends
    everything again.
    """

    version: int | None = None
    """Of the weights that arrived whole; None before the first, during an update and after one that broke off.

    An engine that loses its weights (a server that restarts, sleep without a copy) sets it to None.
    """
    takes_parts: bool = True
    """Whether an update may leave out what training does not change."""
    _coming: int | None = None

    def begin_update(self, version: int) -> None:
        """Weights of this version follow; what there is must not be served any more."""
        self.version, self._coming = None, version

    def load_weights(self, bucket: Bucket) -> None:
        """Take a bucket; when this returns, the bucket's memory is used again."""
        raise NotImplementedError

    def finish_update(self, version: int) -> None:
        """All weights of this version were loaded.

        Raises:
            RunFailure: another update was begun.
        """
        if version != self._coming:
            raise RunFailure(f"engine: an update to version {self._coming} was begun, and one to {version} ends")
        self.version, self._coming = version, None

    def require(self, version: int) -> None:
        """Refuse to serve other weights than those of ``version``; call it before anything is generated.

        Raises:
            RunFailure: the engine has others, none, or a part of them.
        """
        if self.version == version:
            return
        has = f"weights of version {self.version}" if self.version is not None else "no weights of the trainer"
        if self._coming is not None:
            has = f"a part of the weights of version {self._coming}, for the update broke off"
        raise RunFailure(f"engine: has {has}, and version {version} is wanted; sync the weights, then generate")


@dataclass(frozen=True)
class Request:
    """A prompt to be answered."""

    ids: Sequence[int]
    """Token ids of the prompt."""
    seed: tuple[int, ...]
    """Decides what is sampled, together with the prompt and the weights."""


@dataclass(frozen=True)
class Response:
    """A sampled answer."""

    ids: list[int]
    """Token ids, with the stop token if there is one."""
    log_probs: list[float]
    """Of each token when it was sampled, at the sampling's temperature."""
    is_whole: bool
    """Whether a stop token ends it; else it was cut at ``max_new_tokens``."""


EngineMemory = Literal["weights", "cache"]


class Engine(VersionedWeights):
    """Generates responses with weights that `sync_weights` sends to it; every rank has one."""

    dtype: torch.dtype
    """Of its weights."""

    def generate(self, requests: Sequence[Request], *, max_new_tokens: int, temperature: float) -> list[Response]:
        """Sample a response to each request, with the weights of the last update."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Give device memory back, that of the weights and of the cache. Call it when no rank generates."""

    def wake(self, what: EngineMemory) -> None:
        """Take memory again: that of the weights before an update, that of the cache before `generate`."""

    def describe(self) -> str:
        """A line for the start of a run."""
        raise NotImplementedError


class SharedMemorySender(VersionedWeights):
    """Gives buckets to another process on this host: each is a safetensors file in memory, without a name on any disk.

    The kernel frees such a file when neither process has it open, however they end. The other process must run as the
    same user and see this one in ``/proc``. Linux only.

    Args:
        deliver: given the path of a file, has the other process read it, and returns when that is done.
    """

    def __init__(self, deliver: Callable[[str], object]) -> None:
        self._deliver = deliver

    def load_weights(self, bucket: Bucket) -> None:
        """Write a bucket to a file of its own, and have it read.

        Raises:
            Exception: what ``deliver`` raises.
        """
        tensors = dict(sorted(bucket.tensors(), key=lambda item: -item[1].itemsize))  # keeps each aligned
        forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        # Were a file used again, it would change or shrink under a receiver that still reads the last one.
        file = os.memfd_create("fsdp2kit-weights")
        try:
            path = Path(f"/proc/{os.getpid()}/fd/{file}")
            write_safetensors(path, forms, ([tensor.cpu().flatten()] for tensor in tensors.values()))
            self._deliver(str(path))
        finally:
            os.close(file)
