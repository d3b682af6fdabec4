"""A single operation on one device: the loss at a large vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.job.distributed import World
from fsdp2kit.model.head_chunks import PLAIN, Kernels, cross_entropy, over_chunks, rows_at_once
from fsdp2kit.model.loss_kernels import LossKernels
from fsdp2kit.torch_compat import has_float32_products
from tools.benchmarks.harness import Task, run_sides, task_rows


def bench_vocabulary(
    world: World,
    *,
    vocabulary: int = 128_256,
    tokens: int = 16_384,
    hidden: int = 64,
    whole: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 3,
) -> dict[str, Any]:
    """Peak memory of loss and gradients, above hidden states, head and their own gradients, and time, in turns.

    The sides are fsdp2kit with plain operations; on CUDA in 16 bits also with products that add up the head's gradient
    (as a run that does not compile), with the compiled loss, and with both (as a run that compiles); and whole logits.

    Args:
        vocabulary: words.
        tokens: with a target.
        hidden: size of a hidden state.
        whole: also cross-entropy on whole logits; 16.8 GB by default.
        dtype: of hidden states and head.
        rounds: that are timed.
    """
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    # Logits of about 1: far larger ones would give denormal numbers, which are slow on a CPU.
    states = torch.randn(tokens, hidden, generator=generator) * hidden**-0.5
    states = states.to(world.device, kind).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator).to(world.device, kind).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator).to(world.device)
    losses: dict[str, Any] = {
        name: partial(_in_chunks, kernels) for name, kernels in _kernels_here(states, weight, labels).items()
    }
    if whole:
        losses["whole logits"] = lambda hidden, weight, labels: F.cross_entropy(
            (hidden @ weight.T).float(), labels, reduction="sum"
        )
    values: dict[str, float] = {}

    def run(name: str) -> None:
        total = losses[name](states, weight, labels)
        total.backward()
        values[name] = total.item()

    @contextmanager
    def without_gradients() -> Iterator[None]:
        states.grad = weight.grad = None
        yield

    for loss in losses.values():  # imports and compilation must not count as memory
        loss(states[:2], weight, labels[:2])
    sides = {name: Task(partial(run, name), without_gradients) for name in losses}
    rows = task_rows(run_sides(sides, rounds=rounds, warmup=1, world=world))
    for row in rows:
        if row["peak_bytes"] is not None:  # every loss leaves the gradients behind
            row["peak_bytes"] -= states.nbytes + weight.nbytes
        row["loss"] = values[row["name"]]
    return {"rows": rows}


def _kernels_here(states: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Kernels]:
    """The ways of computing the loss in chunks that this device has, by name. The first uses plain operations."""
    kernels = LossKernels(compiles=True)
    loss = kernels.compiled_loss(states, weight, labels)
    adds_products = kernels.adds_products if has_float32_products(weight) else None
    ways = {"fsdp2kit": PLAIN}
    if adds_products is not None:
        ways["fsdp2kit, products"] = Kernels(None, adds_products)
    if loss is not None:
        ways["fsdp2kit, compiled"] = Kernels(loss)
    if loss is not None and adds_products is not None:
        ways["fsdp2kit, compiled, products"] = Kernels(loss, adds_products)
    return ways


def _in_chunks(kernels: Kernels, states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    rows = rows_at_once(states.device, vocabulary=len(weight), narrow=kernels.loss is not None)
    return over_chunks(cross_entropy, states, labels, [weight], rows=rows, kernels=kernels)[0]
