"""What the loss needs beside the hidden states at a large vocabulary: ours, and cross-entropy on whole logits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.bench.figures import positive, provenance, provenance_lines
from fsdp2kit.bench.memory import peak_of
from fsdp2kit.model.linear_cross_entropy import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Options:
    """What is measured; `tools/bench.py vocabulary --help` explains each."""

    vocabulary: int = 128_256
    tokens: int = 16_384
    hidden: int = 64
    whole: bool = False


def bench_vocabulary(options: Options) -> dict[str, Any]:
    """Peak memory of loss and gradients, in float32, above hidden states, head and their own gradients."""
    world = distributed.start()
    losses: dict[str, Loss] = {"fsdp2kit": linear_cross_entropy}
    if options.whole:
        losses["whole logits"] = lambda hidden, weight, labels: F.cross_entropy(
            hidden @ weight.T, labels, reduction="sum"
        )
    peaks = {name: _peak(loss, options, world.device) for name, loss in losses.items()}
    return {
        "benchmark": "vocabulary",
        "options": asdict(options),
        "peak_bytes": {name: peak for name, (peak, _) in peaks.items()},
        "loss": {name: value for name, (_, value) in peaks.items()},
        "provenance": provenance(world),
    }


def vocabulary_lines(result: dict[str, Any]) -> list[str]:
    """The result as a Markdown table."""
    options = result["options"]
    lines = [
        f"{options['tokens']:,} tokens × {options['vocabulary']:,} words, hidden size {options['hidden']}",
        "| loss | memory beside hidden states, head and their gradients |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {(peak or 0) / 1e6:,.0f} MB |" for name, peak in result["peak_bytes"].items()]
    return [*lines, *provenance_lines(result["provenance"])]


def _peak(loss: Loss, options: Options, device: torch.device) -> tuple[int | None, float]:
    """Bytes above the tensors that go in and their gradients, and the loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).to(device).requires_grad_()
    weight = torch.randn(options.vocabulary, options.hidden, generator=generator).to(device).requires_grad_()
    labels = torch.randint(options.vocabulary, (options.tokens,), generator=generator).to(device)
    values: list[float] = []

    def run(_: None) -> None:
        total = loss(hidden, weight, labels)
        total.backward()
        values.append(total.item())

    # Loss and gradients are made within; the gradients are what any loss must leave behind.
    _, peak = peak_of(lambda: None, run, device=device)
    gradients = hidden.nbytes + weight.nbytes
    return (None if peak is None else peak - gradients), values[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py vocabulary``."""
    parser.add_argument("--vocabulary", type=positive, default=128_256, help="words (128256)")
    parser.add_argument("--tokens", type=positive, default=16_384, help="with a target (16384)")
    parser.add_argument("--hidden", type=positive, default=64, help="size of a hidden state (64)")
    parser.add_argument("--whole", action="store_true", help="also cross-entropy on whole logits: 16.8 GB by default")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_vocabulary(Options(options.vocabulary, options.tokens, options.hidden, options.whole))
    return result, vocabulary_lines(result)
