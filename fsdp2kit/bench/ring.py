"""A ring's blocks on one device, without the ring: how exact they are, and their time over the fused kernel's.

All ranks' work of a sequence is done one after the other, block by block as the ring would bring them, and compared
with torch's attention over the whole of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.bench.figures import provenance, provenance_lines, summary
from fsdp2kit.parallel.context_parallel.kernels import Partial, attend_backward, zeros_for
from fsdp2kit.parallel.context_parallel.layout import chunks_of, in_order, take_chunks
from fsdp2kit.parallel.context_parallel.segments import Segment, plan_segments, read_segments

CP = 4
LLAMA_8B = (32, 8, 128)  # query heads, key/value heads, width
TINY = (4, 2, 16)


@dataclass(frozen=True)
class Options:
    """What is measured."""

    lengths: tuple[int, ...] = (8_192, 32_768, 131_072)
    repeats: int = 5
    dry_run: bool = False
    max_minutes: float = 8.0
    """No length is started later than this."""


def bench_ring(options: Options) -> dict[str, Any]:
    """Per length: relative differences from torch's kernel, both times and their ratio, and peak memory."""
    world = distributed.start()
    if options.dry_run:
        options = Options(lengths=(64, 128), repeats=1, dry_run=True, max_minutes=options.max_minutes)
    heads = TINY if options.dry_run else LLAMA_8B
    started, lengths, left_out = time.monotonic(), {}, []
    for length in options.lengths:
        if time.monotonic() - started > 60 * options.max_minutes:
            left_out.append(length)
        else:
            lengths[length] = _measure(length, heads, options.repeats, world.device)
    return {
        "benchmark": "ring",
        "options": asdict(options),
        "heads": heads,
        "lengths": lengths,
        "left_out": left_out,
        "provenance": provenance(world),
    }


def _measure(length: int, heads: tuple[int, int, int], repeats: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    query_heads, kv_heads, width = heads
    shapes = [(1, number, length, width) for number in (query_heads, kv_heads, kv_heads, query_heads)]
    query, key, value, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    plans = [_plan(rank, length) for rank in range(CP)]
    chunks = [chunks_of(rank, cp=CP, length=length, method="ring") for rank in range(CP)]
    ranks = [_Held(*(take_chunks(tensor, mine, dim=2) for tensor in (query, key, value, grad))) for mine in chunks]

    def blocks() -> tuple[list[Tensor], ...]:
        return _all_blocks(ranks, plans)

    def fused() -> tuple[Tensor, ...]:
        q, k, v = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))

    difference = {
        name: _relative(_whole(mine), theirs)
        for name, mine, theirs in zip(("out", "query", "key", "value"), blocks(), fused(), strict=True)
    }
    times: dict[str, list[float]] = {"blocks": [], "fused": []}
    peaks: dict[str, float | None] = {}
    works: list[tuple[str, Callable[[], object]]] = [("blocks", blocks), ("fused", fused)]
    for number in range(repeats):
        for name, work in works if number % 2 else reversed(works):
            seconds, peaks[name] = _timed(work, device)
            times[name].append(seconds)
    figures = {name: summary(taken) for name, taken in times.items()}
    ratio = figures["blocks"]["median_seconds"] / figures["fused"]["median_seconds"]
    return {"difference": difference, "ratio": ratio, "peak_gib": peaks, **figures}


def _plan(rank: int, length: int) -> list[Segment]:
    return read_segments(plan_segments([[0, length]], method="ring", rank=rank, cp=CP, window=None))


class _Held(NamedTuple):
    """One rank's part: ``[1, H, s, D]`` of queries and of the output's gradient, ``[1, G, s, D]`` of keys, values."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor


def _all_blocks(ranks: list[_Held], plans: list[list[Segment]]) -> tuple[list[Tensor], ...]:
    """Output and gradients of query, key and value by rank, block after block as a ring would bring them."""
    scale = ranks[0].query.shape[-1] ** -0.5
    grad_keys, grad_values = ([zeros_for(rank.key) for rank in ranks] for _ in range(2))
    outs, grad_queries = [], []
    for number, (mine, segments) in enumerate(zip(ranks, plans, strict=True)):
        steps = [((number - step) % CP, [s for s in segments if s.step == step]) for step in range(CP)]
        partial = Partial(mine.query)
        for owner, of_step in steps:
            partial.attend(mine.query, ranks[owner].key, ranks[owner].value, of_step, scale=scale)
        outs.append(partial.out.to(mine.query.dtype))
        grad_queries.append(zeros_for(mine.query))
        for owner, of_step in steps:
            attend_backward(
                (grad_queries[-1], grad_keys[owner], grad_values[owner]),
                mine.grad,
                mine.query,
                ranks[owner].key,
                ranks[owner].value,
                outs[-1],
                partial.lse,
                of_step,
                scale=scale,
            )
    return outs, grad_queries, grad_keys, grad_values


def _whole(parts: list[Tensor]) -> Tensor:
    """``[1, H, S, D]`` in the order of the sequence, from every rank's part."""
    return in_order(torch.cat(parts, dim=2).movedim(2, 0), cp=CP, method="ring").movedim(0, 2)


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, float | None]:
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    work()
    if on_cuda:
        torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_cuda else None
    return time.perf_counter() - started, peak


def ring_lines(result: dict[str, Any]) -> list[str]:
    """`bench_ring`'s result for the console."""
    lines = [f"ring: {CP} blocks of a sequence on one device, bf16, heads {result['heads']}, forward and backward"]
    for length, found in result["lengths"].items():
        differences = ", ".join(f"{name} {value:.1e}" for name, value in found["difference"].items())
        lines.append(
            f"  {length:>7} tokens: {found['ratio']:.3f} × the fused kernel's time "
            f"({found['fused']['median_seconds'] * 1e3:.1f} ms), differences {differences}, "
            f"peak {found['peak_gib']['blocks']} GiB"
        )
    lines += [f"  {length:>7} tokens: left out for time" for length in result["left_out"]]
    return [*lines, *provenance_lines(result["provenance"])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py ring``."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes: does it run at all?")
    parser.add_argument("--max-minutes", type=float, default=8.0, help="start no further length after this long (8)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_ring(Options(dry_run=options.dry_run, max_minutes=options.max_minutes))
    return result, ring_lines(result)
