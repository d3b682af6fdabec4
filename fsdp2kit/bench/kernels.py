"""Single operations on one device: a ring's blocks beside fused attention, the loss at a large vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.bench.harness import Task, run_sides, task_rows
from fsdp2kit.job.distributed import World
from fsdp2kit.model.head_chunks import cross_entropy, over_chunks, rows_at_once
from fsdp2kit.parallel.context_parallel.kernels import RunningAttention, attend_backward
from fsdp2kit.parallel.context_parallel.layout import chunks_of, in_order, take_chunks
from fsdp2kit.parallel.context_parallel.segments import plan_segments, read_segments
from fsdp2kit.torch_compat import BackwardInputs

CP = 4
LLAMA_8B = (32, 8, 128)  # query heads, key/value heads, width
TINY = (4, 2, 16)


def bench_ring(
    world: World, *, lengths: tuple[int, ...] = (8_192, 32_768, 131_072), rounds: int = 5, dry_run: bool = False
) -> Iterator[dict[str, Any]]:
    """A ring's blocks without the ring, beside torch's attention over the whole sequence, by length.

    One device does all ranks' work on a sequence, one block after the other as the ring would bring them: how far the
    results differ, both times, their ratio, and peak memory.

    Args:
        lengths: tokens of a sequence.
        rounds: that count.
        dry_run: tiny shapes; does it run at all?
    """
    rows, notes = [], [f"{CP} blocks of a sequence, bfloat16, forward and backward"]
    for length in (64, 128) if dry_run else lengths:
        found = _measure_ring(length, TINY if dry_run else LLAMA_8B, rounds, world)
        rows += [{"tokens": length, **row} for row in found]
        yield {"rows": rows, "notes": notes}


def _measure_ring(length: int, heads: tuple[int, int, int], rounds: int, world: World) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    query_heads, kv_heads, width = heads
    shapes = [(1, number, length, width) for number in (query_heads, kv_heads, kv_heads, query_heads)]
    whole = [torch.randn(shape, device=world.device, dtype=torch.bfloat16) for shape in shapes]
    chunks = [chunks_of(rank, cp=CP, length=length, method="ring") for rank in range(CP)]
    ranks = [[take_chunks(tensor, mine, dim=2) for tensor in whole] for mine in chunks]
    tables = [plan_segments([[0, length]], method="ring", rank=rank, cp=CP, window=None) for rank in range(CP)]

    def fused() -> list[Tensor]:
        q, k, v = (tensor.detach().requires_grad_() for tensor in whole[:3])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3])]

    sides = {"blocks": Task(lambda: _all_blocks(ranks, tables)), "fused": Task(fused)}
    rows = task_rows(run_sides(sides, rounds=rounds, warmup=1, world=world))
    found = _all_blocks(ranks, tables)
    for name, parts, theirs in zip(("out", "query", "key", "value"), found, fused(), strict=True):
        # In the order of the sequence, from every rank's part.
        mine = in_order(torch.cat(parts, 2).movedim(2, 0), cp=CP, method="ring").movedim(0, 2)
        difference = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        rows[0][f"{name}_differs_by"] = difference.item()
    return rows


def _all_blocks(ranks: list[list[Tensor]], tables: list[Tensor]) -> tuple[list[Any], ...]:
    """Output and gradients of query, key and value by rank, one block after the other as a ring would bring them.

    Args:
        ranks: each rank's queries ``[1, H, s, D]``, keys and values ``[1, G, s, D]``, and gradient of the output.
        tables: each rank's segments.
    """
    scale = ranks[0][0].shape[-1] ** -0.5
    outs, grad_queries, grad_keys, grad_values = (list[Any]([None] * CP) for _ in range(4))
    for number, ((query, _, _, grad), table) in enumerate(zip(ranks, tables, strict=True)):
        segments = read_segments(table)
        steps = [((number - step) % CP, [s for s in segments if s.step == step]) for step in range(CP)]
        attended = RunningAttention(query, scale=scale)
        for owner, of_step in steps:
            attended.attend(ranks[owner][1], ranks[owner][2], of_step)
        outs[number] = attended.out.to(query.dtype)
        for owner, of_step in steps:
            grad_queries[number], grad_keys[owner], grad_values[owner] = attend_backward(
                (grad_queries[number], grad_keys[owner], grad_values[owner]),
                BackwardInputs(grad, query, ranks[owner][1], ranks[owner][2], outs[number], attended.lse),
                of_step,
                scale=scale,
            )
    return outs, grad_queries, grad_keys, grad_values


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

    Args:
        vocabulary: words.
        tokens: with a target.
        hidden: size of a hidden state.
        whole: also cross-entropy on whole logits; 16.8 GB by default.
        dtype: of hidden states and head.
        rounds: that are timed.
    """
    generator, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
    # Logits of about 1: far larger ones would give denormal numbers, which are slow on a CPU.
    states = torch.randn(tokens, hidden, generator=generator) * hidden**-0.5
    states = states.to(world.device, kind).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator).to(world.device, kind).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator).to(world.device)
    rows_of_chunk = rows_at_once(world.device, vocabulary=vocabulary)
    losses: dict[str, Any] = {
        "fsdp2kit": lambda hidden, weight, labels: over_chunks(
            cross_entropy, hidden, labels, [weight], rows=rows_of_chunk
        )[0]
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
        loss(states[:1], weight, labels[:1])
    sides = {name: Task(partial(run, name), without_gradients) for name in losses}
    rows = task_rows(run_sides(sides, rounds=rounds, warmup=1, world=world))
    for row in rows:
        if row["peak_bytes"] is not None:  # every loss leaves the gradients behind
            row["peak_bytes"] -= states.nbytes + weight.nbytes
        row["loss"] = values[row["name"]]
    return {"rows": rows}
