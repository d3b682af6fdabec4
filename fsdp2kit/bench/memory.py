"""Memory: the peak of one piece of work, and what the loss needs at a large vocabulary.

On a CPU what is counted is what a process does not share with the file cache: ``RssAnon`` of ``/proc/self/status``.
Pages of a memory-mapped safetensors file that are only read do not count, for the kernel can drop them at any time.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.bench.harness import Command, cost_rows, option, provenance, time_in_turns
from fsdp2kit.model.linear_cross_entropy import (
    liger_linear_cross_entropy,
    linear_cross_entropy,
    torch_linear_cross_entropy,
)

T = TypeVar("T")
_SAMPLE_SECONDS = 0.001


class PrivateMemory:
    """``with PrivateMemory() as memory:`` then ``memory.peak``: bytes above those at the start of the block.

    A thread samples about every millisecond; what lives shorter than that, or while the main thread holds the
    interpreter's lock, is missed.
    """

    def __enter__(self) -> PrivateMemory:
        give_back_memory()
        self._baseline = self._highest = private_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self._highest = max(self._highest, private_bytes())

    def forget_peak(self) -> None:
        """Forget the peak so far, but not what there was at the start of the block."""
        give_back_memory()
        self._highest = private_bytes()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            self._highest = max(self._highest, private_bytes())

    @property
    def peak(self) -> int:
        """Bytes above those at the start of the block."""
        return self._highest - self._baseline


def peak_of(build: Callable[[], T], run: Callable[[T], object], *, device: torch.device) -> tuple[T, int | None]:
    """What ``build`` returned, and the bytes that it and ``run`` on it needed at the peak of ``run``.

    Counted above what was there before: the allocator's on CUDA, private memory on a CPU (None where the system does
    not tell). What building needs for a moment only is left out.
    """
    if device.type == "cuda":
        give_back_memory()
        before = torch.cuda.memory_allocated(device)
        built = build()
        torch.cuda.reset_peak_memory_stats(device)
        run(built)
        return built, torch.cuda.max_memory_allocated(device) - before
    if not sys.platform.startswith("linux"):
        built = build()
        run(built)
        return built, None
    with PrivateMemory() as memory:
        built = build()
        memory.forget_peak()
        run(built)
    return built, memory.peak


def private_bytes() -> int:
    """Private (anonymous) resident memory of this process, in bytes."""
    with Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def give_back_memory() -> None:
    """Return freed memory to the system, so that a later measurement does not start from what an earlier one left."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
KERNELS: dict[str, Loss] = {"torch": torch_linear_cross_entropy, "liger": liger_linear_cross_entropy}


@dataclass(frozen=True)
class Vocabulary:
    """The head and the tokens of a loss, and the kernels that compute it."""

    vocabulary: int = option(128_256, "words")
    tokens: int = option(16_384, "with a target")
    hidden: int = option(64, "size of a hidden state")
    whole: bool = option(False, "also cross-entropy on whole logits: 16.8 GB by default")
    kernels: tuple[str, ...] = option((), "others beside ours (none)", nargs="*", choices=list(KERNELS))
    dtype: str = option("float32", "(float32)", choices=["float32", "bfloat16"])
    rounds: int = option(3, "that are timed")


def bench_vocabulary(options: Vocabulary) -> dict[str, Any]:
    """Peak memory of loss and gradients, above hidden states, head and their own gradients, and time, in turns."""
    world = distributed.start()
    losses: dict[str, Loss] = {"fsdp2kit": linear_cross_entropy, **{name: KERNELS[name] for name in options.kernels}}
    if options.whole:
        losses["whole logits"] = _whole_logits
    measured = {name: _peak(loss, options, world.device) for name, loss in losses.items()}
    inputs = _inputs(options, world.device)

    def forget_gradients() -> None:
        for tensor in inputs:
            tensor.grad = None

    ways = {name: partial(_loss_and_gradients, loss, inputs) for name, loss in losses.items()}
    rows = cost_rows(time_in_turns(ways, options.rounds, device=world.device, before=forget_gradients))
    for row in rows:
        row["peak_bytes"], row["loss"] = measured[row["name"]]
    return {"benchmark": "vocabulary", "options": asdict(options), "rows": rows, "provenance": provenance(world)}


def _whole_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")


def _loss_and_gradients(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    total = loss(*inputs)
    total.backward()
    return total.detach()


def _peak(loss: Loss, options: Vocabulary, device: torch.device) -> tuple[int | None, float]:
    """Bytes above the tensors that go in and their gradients, and the loss."""
    inputs = hidden, weight, labels = _inputs(options, device)
    values: list[float] = []
    # What is imported or compiled for it first is none of its memory.
    loss(hidden[:1], weight, labels[:1])
    _, peak = peak_of(lambda: None, lambda _: values.append(_loss_and_gradients(loss, inputs).item()), device=device)
    # Any loss must leave the gradients behind.
    return (None if peak is None else peak - hidden.nbytes - weight.nbytes), values[0]


def _inputs(options: Vocabulary, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, options.dtype)
    # Logits of the size of one: far larger ones would underflow to denormal numbers, which take a CPU long.
    hidden = torch.randn(options.tokens, options.hidden, generator=generator) * options.hidden**-0.5
    hidden = hidden.to(device, dtype).requires_grad_()
    weight = torch.randn(options.vocabulary, options.hidden, generator=generator).to(device, dtype).requires_grad_()
    labels = torch.randint(options.vocabulary, (options.tokens,), generator=generator).to(device)
    return hidden, weight, labels


COMMANDS = {"vocabulary": Command(Vocabulary, bench_vocabulary)}
