"""How fast context parallelism is: whole training steps beside data parallelism, and a ring's blocks on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.bench.harness import Command, cost_rows, option, provenance, speed, spread, time_in_turns
from fsdp2kit.bench.memory import peak_of
from fsdp2kit.bench.sides import OurSide, Synthetic, run_sides
from fsdp2kit.config import TrainingConfig
from fsdp2kit.distributed import World
from fsdp2kit.errors import UserError
from fsdp2kit.parallel.context_parallel.kernels import Partial, attend_backward, zeros_for
from fsdp2kit.parallel.context_parallel.layout import chunks_of, in_order, take_chunks
from fsdp2kit.parallel.context_parallel.segments import Segment, plan_segments, read_segments
from fsdp2kit.torch_compat import BackwardInputs

METHODS = ("ulysses", "ring", "allgather")
CP = 4
LLAMA_8B = (32, 8, 128)  # query heads, key/value heads, width
TINY = (4, 2, 16)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Whose steps are timed, on which rows."""

    model: str = option(..., "a Hugging Face directory; weights are random", metavar="DIR")
    seq_len: int = option(4096, "tokens a sequence")
    rounds: int = option(10, "rounds that count, each of all four ways")
    warmup: int = option(1, "rounds before those")
    layers: int | None = option(None, "of the model's layers, so many (all)", type=int)
    dtype: str = option("float32", "of the computation (float32)", choices=("float32", "bfloat16"))


def bench_context_parallel(options: Steps) -> dict[str, Any]:
    """Training steps at dp = ranks and of every method at cp = ranks in turns, one row a rank. Collective.

    Raises:
        UserError: on one rank there is nothing to compare.
    """
    world = distributed.start(timeout_minutes=60)
    if world.size == 1:
        raise UserError("bench context-parallel", "needs two ranks or more", "start it with torchrun")
    source = provenance(world)
    sides = {method: OurSide(_config(options, method, world), world=world) for method in ("none", *METHODS)}
    found = run_sides(sides, rounds=options.rounds, warmup=options.warmup, world=world)
    alone = found["none"]
    rows = [
        {
            "method": method,
            "tokens_per_second_over_dp": speed(side["seconds"], alone["seconds"]),
            "step": spread(side["seconds"]),
            "peak_bytes": side["peak_bytes"],
            "loss": side["losses"][-1],
        }
        for method, side in found.items()
    ]
    return {
        "benchmark": "context-parallel",
        "options": asdict(options),
        "rows": rows,
        "notes": [f"{method}: {side['ran']}" for method, side in found.items()],
        "bars": {"seconds a step": ["step"], "peak memory a rank (bytes)": ["peak_bytes"]},
        "provenance": source,
    }


def _config(options: Steps, method: str, world: World) -> TrainingConfig:
    depth = {} if options.layers is None else {"num_hidden_layers": options.layers}
    values: dict[str, Any] = {
        "recipe": "bench",
        "model": {"path": options.model, "weights": "random", "config": depth},
        "mesh": {"cp": 1 if method == "none" else world.size},
        "context_parallel": {"method": "auto" if method == "none" else method},
        "fsdp": {"param_dtype": options.dtype},
        "data": {"format": "synthetic", "seq_len": options.seq_len},
        "train": {"steps": options.warmup + options.rounds, "global_batch_size": world.size, "micro_batch_size": 1},
        "optimizer": {"lr": 1e-4},
    }
    return Synthetic.model_validate(values)


@dataclass(frozen=True)
class Blocks:
    """Which sequences, and how long."""

    lengths: tuple[int, ...] = option((8_192, 32_768, 131_072), "tokens (8192 32768 131072)", type=int, nargs="+")
    rounds: int = option(5, "that count")
    device: str = option("cuda", "cpu: only with --dry-run", choices=("cuda", "cpu"))
    dry_run: bool = option(False, "tiny shapes: does it run at all?")
    max_minutes: float = option(8.0, "start no further length after this long")


def bench_ring(options: Blocks) -> dict[str, Any]:
    """A ring's blocks without the ring, against torch's attention over the whole sequence, by length.

    All ranks' work of a sequence is done one after the other on one device, block by block as the ring would bring
    them: how far the results differ, both times, their ratio, and peak memory.
    """
    world = distributed.start()
    started, rows, left_out = time.monotonic(), [], []
    for length in (64, 128) if options.dry_run else options.lengths:
        if time.monotonic() - started > 60 * options.max_minutes:
            left_out.append(length)
        else:
            rows.append(_measure(length, TINY if options.dry_run else LLAMA_8B, options.rounds, world.device))
    return {
        "benchmark": "ring",
        "options": asdict(options),
        "rows": rows,
        "left_out": left_out,
        "notes": [
            f"{CP} blocks of a sequence, bfloat16, forward and backward",
            *(f"{length} tokens: left out for time" for length in left_out),
        ],
        "bars": {"seconds": ["blocks", "fused"]},
        "provenance": provenance(world),
    }


class _Held(NamedTuple):
    """One rank's part: ``[1, H, s, D]`` of queries and of the output's gradient, ``[1, G, s, D]`` of keys, values."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor


def _measure(length: int, heads: tuple[int, int, int], rounds: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    query_heads, kv_heads, width = heads
    shapes = [(1, number, length, width) for number in (query_heads, kv_heads, kv_heads, query_heads)]
    whole = _Held(*(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes))
    chunks = [chunks_of(rank, cp=CP, length=length, method="ring") for rank in range(CP)]
    ranks = [_Held(*(take_chunks(tensor, mine, dim=2) for tensor in whole)) for mine in chunks]
    tables = [plan_segments([[0, length]], method="ring", rank=rank, cp=CP, window=None) for rank in range(CP)]
    plans = [read_segments(table) for table in tables]

    def fused() -> list[Tensor]:
        q, k, v = (tensor.detach().requires_grad_() for tensor in whole[:3])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole.grad)]

    ways: dict[str, Callable[[], Any]] = {"blocks": lambda: _all_blocks(ranks, plans), "fused": fused}
    # In the order of the sequence, from every rank's part.
    found = [
        in_order(torch.cat(part, 2).movedim(2, 0), cp=CP, method="ring").movedim(0, 2) for part in ways["blocks"]()
    ]
    differences = {
        f"{name}_differs_by": ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item()
        for name, mine, theirs in zip(("out", "query", "key", "value"), found, fused(), strict=True)
    }
    peaks = {name: peak_of(lambda: None, lambda _, way=way: way(), device=device)[1] for name, way in ways.items()}
    blocks, other = cost_rows(time_in_turns(ways, rounds, device=device))
    return {
        "tokens": length,
        "blocks": blocks["seconds"],
        "fused": other["seconds"],
        "times_as_fast": other["blocks_is_faster"],
        **{f"{name}_peak_bytes": peak for name, peak in peaks.items()},
        **differences,
    }


def _all_blocks(ranks: list[_Held], plans: list[list[Segment]]) -> tuple[list[Tensor], ...]:
    """Output and gradients of query, key and value by rank, block after block as a ring would bring them."""
    scale = ranks[0].query.shape[-1] ** -0.5
    grad_keys, grad_values = ([zeros_for(rank.key) for rank in ranks] for _ in range(2))
    outs, grad_queries = [], []
    for number, (mine, segments) in enumerate(zip(ranks, plans, strict=True)):
        steps = [((number - step) % CP, [s for s in segments if s.step == step]) for step in range(CP)]
        partial = Partial(mine.query, scale=scale)
        for owner, of_step in steps:
            partial.attend(ranks[owner].key, ranks[owner].value, of_step)
        outs.append(partial.out.to(mine.query.dtype))
        grad_queries.append(zeros_for(mine.query))
        for owner, of_step in steps:
            block = (ranks[owner].key, ranks[owner].value)
            attend_backward(
                (grad_queries[-1], grad_keys[owner], grad_values[owner]),
                BackwardInputs(mine.grad, mine.query, *block, outs[-1], partial.lse),
                of_step,
                scale=scale,
            )
    return outs, grad_queries, grad_keys, grad_values


COMMANDS = {"context-parallel": Command(Steps, bench_context_parallel), "ring": Command(Blocks, bench_ring)}
