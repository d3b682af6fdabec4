"""What the loss needs at a large vocabulary: ours, torch's and Liger's kernels, and cross-entropy on whole logits."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.bench.figures import barrier, positive, provenance, provenance_lines
from fsdp2kit.bench.memory import peak_of
from fsdp2kit.model.linear_cross_entropy import linear_cross_entropy
from fsdp2kit.model.loss_kernels import liger_linear_cross_entropy, torch_linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
KERNELS: dict[str, Loss] = {"torch": torch_linear_cross_entropy, "liger": liger_linear_cross_entropy}


@dataclass(frozen=True)
class Options:
    """What is measured; `tools/bench.py vocabulary --help` explains each."""

    vocabulary: int = 128_256
    tokens: int = 16_384
    hidden: int = 64
    whole: bool = False
    kernels: tuple[str, ...] = ()
    dtype: str = "float32"
    repeats: int = 3


def bench_vocabulary(options: Options) -> dict[str, Any]:
    """Peak memory of loss and gradients, above hidden states, head and their own gradients, and seconds, in turns."""
    world = distributed.start()
    losses: dict[str, Loss] = {"fsdp2kit": linear_cross_entropy, **{name: KERNELS[name] for name in options.kernels}}
    if options.whole:
        losses["whole logits"] = lambda hidden, weight, labels: F.cross_entropy(
            (hidden @ weight.T).float(), labels, reduction="sum"
        )
    peaks = {name: _peak(loss, options, world.device) for name, loss in losses.items()}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    inputs = _inputs(options, world.device)
    for _ in range(options.repeats):
        for name, loss in losses.items():
            seconds[name].append(_seconds(loss, inputs, world.device))
    return {
        "benchmark": "vocabulary",
        "options": asdict(options),
        "peak_bytes": {name: peak for name, (peak, _) in peaks.items()},
        "loss": {name: value for name, (_, value) in peaks.items()},
        "seconds": seconds,
        "provenance": provenance(world),
    }


def vocabulary_lines(result: dict[str, Any]) -> list[str]:
    """The result as a Markdown table."""
    options = result["options"]
    lines = [
        f"{options['tokens']:,} tokens × {options['vocabulary']:,} words, hidden size {options['hidden']}, "
        f"{options['dtype']}, median of {options['repeats']} in turns (on a CPU, of processor time)",
        "| loss | memory beside hidden states, head and their gradients | seconds | its value |",
        "| --- | --- | --- | --- |",
    ]
    for name, peak in result["peak_bytes"].items():
        seconds = f"{statistics.median(result['seconds'][name]):.3f}" if result["seconds"][name] else "not taken"
        lines.append(f"| {name} | {(peak or 0) / 1e6:,.0f} MB | {seconds} | {result['loss'][name]:,.3f} |")
    return [*lines, *provenance_lines(result["provenance"])]


def _peak(loss: Loss, options: Options, device: torch.device) -> tuple[int | None, float]:
    """Bytes above the tensors that go in and their gradients, and the loss."""
    hidden, weight, labels = _inputs(options, device)
    values: list[float] = []

    def run(_: None) -> None:
        total = loss(hidden, weight, labels)
        total.backward()
        values.append(total.detach().item())

    # Loss and gradients are made within; the gradients are what any loss must leave behind.
    loss(hidden[:1], weight, labels[:1])  # what is imported or compiled for it first is none of its memory
    _, peak = peak_of(lambda: None, run, device=device)
    gradients = hidden.nbytes + weight.nbytes
    return (None if peak is None else peak - gradients), values[0]


def _inputs(options: Options, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, options.dtype)
    # Logits of the size of one: far larger ones would underflow to denormal numbers, which take a CPU long.
    hidden = torch.randn(options.tokens, options.hidden, generator=generator) * options.hidden**-0.5
    hidden = hidden.to(device, dtype).requires_grad_()
    weight = torch.randn(options.vocabulary, options.hidden, generator=generator).to(device, dtype).requires_grad_()
    labels = torch.randint(options.vocabulary, (options.tokens,), generator=generator).to(device)
    return hidden, weight, labels


def _seconds(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], device: torch.device) -> float:
    """Of one loss with its gradients; on a CPU the process's own time, whatever else runs."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for tensor in inputs:
        tensor.grad = None
    barrier(device)
    start = clock()
    loss(*inputs).backward()
    barrier(device)
    return clock() - start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py vocabulary``."""
    parser.add_argument("--vocabulary", type=positive, default=128_256, help="words (128256)")
    parser.add_argument("--tokens", type=positive, default=16_384, help="with a target (16384)")
    parser.add_argument("--hidden", type=positive, default=64, help="size of a hidden state (64)")
    parser.add_argument("--whole", action="store_true", help="also cross-entropy on whole logits: 16.8 GB by default")
    parser.add_argument("--kernels", nargs="*", choices=list(KERNELS), default=[], help="others beside ours (none)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(float32)")
    parser.add_argument("--repeats", type=positive, default=3, help="that are timed (3)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_vocabulary(
        Options(
            options.vocabulary,
            options.tokens,
            options.hidden,
            whole=options.whole,
            kernels=tuple(options.kernels),
            dtype=options.dtype,
            repeats=options.repeats,
        )
    )
    return result, vocabulary_lines(result)
