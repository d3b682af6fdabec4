"""The interface of a rollout engine, and what it receives: buckets of named tensors, with a version."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fsdp2kit.errors import RunFailure
from fsdp2kit.weights.safetensors_file import write_safetensors
from fsdp2kit.weights.transfer import MappingReader


@dataclass(frozen=True)
class Entry:
    """A tensor's place in a bucket."""

    name: str
    """Its name in a Hugging Face file."""
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
    """Tensors in one flat tensor. Its memory is used again once they are loaded, so copy what you keep."""

    entries: tuple[Entry, ...]
    data: Tensor
    """``[bytes]`` uint8, on the trainer's device."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each entry; the tensors are views of ``data``."""
        for entry in self.entries:
            flat = self.data[entry.offset : entry.offset + entry.nbytes]
            yield entry.name, flat.view(entry.dtype).view(entry.shape)


class VersionedWeights:
    """The version of the weights that an engine has. A subclass adds ``load_weights``.

    `sync_weights` calls ``begin_update(version)``, ``load_weights(bucket)`` for each bucket, and
    ``finish_update(version)``. If one of them raises, on any rank, there is no version, and the next sync sends
    everything again.
    """

    version: int | None = None
    """Version of the weights that arrived whole; None before the first update, during one, and after one that failed.

    An engine that loses its weights (a server that restarts, sleep without a copy) sets it to None.
    """
    takes_parts: bool = True
    """Whether an update may leave out what training does not change."""
    _coming: int | None = None

    def begin_update(self, version: int) -> None:
        """Weights of this version follow; the engine must not serve the old ones any more."""
        self.version = None
        self._coming = version

    def load_weights(self, bucket: Bucket) -> None:
        """Take a bucket; when this returns, the bucket's memory is used again."""
        raise NotImplementedError

    def finish_update(self, version: int) -> None:
        """All weights of this version were loaded."""
        if version != self._coming:
            raise RunFailure(f"engine: an update to version {self._coming} was begun, and one to {version} ends")
        self.version = version
        self._coming = None

    def require(self, version: int) -> None:
        """Raise a RunFailure unless the engine has the weights of ``version``; call it before generating."""
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
    """With the prompt and the weights, it decides what is sampled."""
    room: int | None = None
    """Most tokens of its response where that is less than ``max_new_tokens``."""


@dataclass(frozen=True)
class Episode:
    """What a response is made of that took turns with an environment (`fsdp2kit.rl.environments.conversations`)."""

    prompt: list[int]
    """Token ids of the messages that the environment began with."""
    asked: list[dict[str, Any]]
    """These messages."""
    said: list[dict[str, Any]]
    """The messages after them: the model's, and the environment's."""
    sampled: list[bool]
    """For each of the response's tokens, whether the model sampled it; the others are the environment's."""
    reward: float
    """The environment's; 0 if the conversation was cut."""

    @property
    def turns(self) -> int:
        """The model's turns."""
        return sum(message["role"] == "assistant" for message in self.said)


@dataclass(frozen=True)
class Response:
    """A sampled answer."""

    ids: list[int]
    """Token ids, with the stop token if there is one."""
    log_probs: list[float]
    """Each token's log-probability when it was sampled, at the sampling's temperature; 0 for an environment's."""
    is_whole: bool
    """A stop token ends it, and an environment its conversation; otherwise it was cut."""
    conversation: Episode | None = None
    """Where the response took turns with an environment."""

    @property
    def sampled(self) -> list[bool]:
        """For each token, whether the model sampled it."""
        return [True] * len(self.ids) if self.conversation is None else self.conversation.sampled

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Response:
        """The response that `dataclasses.asdict` made into a dict."""
        conversation = values.get("conversation")
        return cls(**{**values, "conversation": conversation and Episode(**conversation)})


EngineMemory = Literal["weights", "cache"]
GoOn = Callable[[int, Response], Request | None]
"""Given the index of a conversation and the model's turn, what to ask next; None: the conversation is over."""


class RolloutEngine(VersionedWeights):
    """Generates responses with weights that `sync_weights` sends to it; every rank has one."""

    dtype: torch.dtype
    """The dtype of its weights."""

    def generate(self, requests: Sequence[Request], *, max_new_tokens: int, temperature: float) -> list[Response]:
        """Sample a response to each request, with the weights of the last update."""
        raise NotImplementedError

    def converse(
        self, requests: Sequence[Request], go_on: GoOn, *, max_new_tokens: int, temperature: float, at_once: int
    ) -> None:
        """Sample a response to each request, and then to what ``go_on`` makes of the response, until it gives None.

        Here all conversations take a turn together, so that their order, and with it all rounding, is always the same.

        Args:
            go_on: called with a request's index and its response, from ``at_once`` threads.
            at_once: most conversations that go on at once.
        """
        waiting = dict(enumerate(requests))
        with ThreadPoolExecutor(at_once) as pool:
            while self._any_rank(bool(waiting)):
                options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
                responses = self.generate(list(waiting.values()), **options)
                with self.together():
                    following = list(pool.map(go_on, waiting, responses))
                asked = zip(waiting, following, strict=True)
                waiting = {at: request for at, request in asked if request is not None}

    def _any_rank(self, waits: bool) -> bool:
        """Whether any of the ranks that generate together waits for responses."""
        return waits

    def together(self) -> AbstractContextManager[None]:
        """Encloses work after which the ranks that generate together go on, or fail, together."""
        return nullcontext()

    def sleep(self) -> None:
        """Free the device memory of weights and cache. Call it when no rank generates."""

    def wake(self, what: EngineMemory) -> None:
        """Take memory again: for the weights before an update, for the cache before `generate`."""

    def describe(self) -> str:
        """A line for the start of a run."""
        raise NotImplementedError


class SharedMemorySender(VersionedWeights):
    """Gives buckets to another process on this host: each is a safetensors file in memory, without a name on any disk.

    The kernel frees such a file when neither process has it open, however they end. The other process must run as the
    same user and see this one in ``/proc``. Linux only.

    Args:
        deliver: gets the path of a file, and returns when the other process has read it.
    """

    def __init__(self, deliver: Callable[[str], object]) -> None:
        self._deliver = deliver

    def load_weights(self, bucket: Bucket) -> None:
        """Write a bucket to a file of its own, and have it read."""
        tensors = dict(sorted(bucket.tensors(), key=lambda item: -item[1].itemsize))  # keeps each aligned
        forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        # A new file each time: a receiver may still read the last one.
        file = os.memfd_create("fsdp2kit-weights")
        try:
            path = Path(f"/proc/{os.getpid()}/fd/{file}")
            write_safetensors(path, forms, MappingReader(tensors))
            self._deliver(str(path))
        finally:
            os.close(file)
