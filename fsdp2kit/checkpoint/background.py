"""A save beside training: one thread copies tensors to host memory, another writes the copy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fsdp2kit.job.distributed import agreement, background_group, work_on_this_device
from fsdp2kit.torch_compat import STAGER_WORKS_ONCE

Tensors = dict[str, dict[str, Tensor]]


class BackgroundSave:
    """At most one save at a time. Made on all ranks together.

    Host memory of the size of the shards is kept from one save to the next.
    """

    def __init__(self) -> None:
        self.group = background_group()
        """For a save's collectives, and for nothing else."""
        self._stager = _build_stager()
        self._writer = ThreadPoolExecutor(1, "fsdp2kit-save", initializer=work_on_this_device())
        self._staged: Future[Tensors] | None = None
        self._saved: Future[None] | None = None
        self._waited, self._waits_since = 0.0, None

    @property
    def waited(self) -> float:
        """Seconds that the caller has waited for the newest save so far, also if it waits now. Any thread may ask."""
        since = self._waits_since
        return self._waited + (0.0 if since is None else time.monotonic() - since)

    def begin(self, tensors: Tensors, write: Callable[..., None], *arguments: Any) -> None:
        """Begin to copy `tensors`, and have ``write(copy, *arguments)`` called once every rank has its copy."""
        self._waited = 0.0
        with self._waiting():
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the copying stream does not wait for the optimizer's kernels
            if STAGER_WORKS_ONCE:
                self._stager.close()
                self._stager = _build_stager()
            self._staged = cast("Future[Tensors]", self._stager.stage(tensors))
            self._saved = self._writer.submit(self._write, self._staged, write, *arguments)

    def _write(self, staged: Future[Tensors], write: Callable[..., None], *arguments: Any) -> None:
        write(self.collect(staged), *arguments)

    def collect(self, staged: Future[Tensors]) -> Tensors:
        """The copy, once it is made on every rank. Collective."""
        with agreement(self.group):
            tensors = staged.result()
        return tensors

    def wait_until_staged(self) -> None:
        """Return when the tensors that are copied may change; `finish` reports what went wrong."""
        if self._staged is not None and not self._staged.done():
            with self._waiting():
                wait([self._staged])

    def has_failed(self) -> bool:
        """Whether the save is over and failed, as far as this rank knows; `finish` then raises."""
        return self._saved is not None and self._saved.done() and self._saved.exception() is not None

    def finish(self) -> None:
        """Wait for the save, if one is under way, and raise its error."""
        saved, self._saved, self._staged = self._saved, None, None
        if saved is not None:
            with self._waiting():
                saved.result()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waited, self._waits_since = self.waited, None


def _build_stager() -> DefaultStager:
    on_device = torch.cuda.is_available()  # a Mac's accelerator is not trained on
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_device,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=on_device,
        )
    )
