"""One save at a time, beside training: copied while the next forward and backward run, written by a thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fsdp2kit.checkpoint.writer import Contents
from fsdp2kit.distributed import agreement

Tensors = dict[str, dict[str, Tensor]]


class BackgroundSave:
    """Copies what a save holds to host memory, in a thread, and hands the copy to `save` in another.

    The order that keeps it right: `start` after an optimizer step, `wait_until_staged` before the next one,
    `finish` before the next `start`. Host memory of the size of the shards is kept from one save to the next.

    Args:
        save: writes a copy; runs in a thread, so its collectives must be on `group`.
        group: of all ranks, and used by nothing else.
    """

    def __init__(self, save: Callable[[Contents], object], *, group: dist.ProcessGroup | None) -> None:
        on_device = torch.accelerator.is_available()
        # Its own stream for copies from a device is made here, on the main thread, as torch asks.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_device,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=on_device,
            )
        )
        self._save = save
        self._group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fsdp2kit-save")
        self._staged: Future[Tensors] | None = None
        self._saved: Future[None] | None = None

    def start(self, contents: Contents) -> None:
        """Begin to copy and then to write `contents`, and return at once. Nothing else may be under way."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the copying stream does not wait for the optimizer's kernels by itself
        staged = cast("Future[Tensors]", self._stager.stage(contents.tensors))
        self._staged, self._saved = staged, self._thread.submit(self._carry_out, staged, contents)

    def wait_until_staged(self) -> None:
        """Return when parameters and optimizer state may change. What went wrong is told by `finish`."""
        if self._staged is not None:
            wait([self._staged])

    def has_failed(self) -> bool:
        """Whether the save is over and failed, as far as this rank knows."""
        return self._saved is not None and self._saved.done() and self._saved.exception() is not None

    def finish(self) -> None:
        """Wait for the save under way, if any.

        Raises:
            RunFailure: it failed; on every rank.
        """
        saved, self._saved, self._staged = self._saved, None, None
        if saved is not None:
            saved.result()

    def _carry_out(self, staged: Future[Tensors], contents: Contents) -> None:
        self._save(dataclasses.replace(contents, tensors=self.collect(staged)))

    def collect(self, staged: Future[Tensors]) -> Tensors:
        """The copy, once it is made on every rank. Collective."""
        with agreement(self._group):
            tensors = staged.result()
        return tensors
