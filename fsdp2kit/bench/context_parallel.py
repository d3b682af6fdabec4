"""What context parallelism costs: activations kept, bytes sent, and time against data parallelism.

The same global batch each time. Memory and bytes are counted on a small decoder without FSDP, so that nothing but
activations and attention's exchanges is there to count; time is measured on whole training steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2kit import distributed
from fsdp2kit.bench.contest import Course, take_turns
from fsdp2kit.bench.figures import compare, positive, provenance, provenance_lines, summary
from fsdp2kit.bench.sides import OurSide, Side
from fsdp2kit.bench.traffic import Traffic, count_traffic
from fsdp2kit.bench.trainer import build_trainer
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.schema import FSDPConfig, MeshConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.parallel.context_parallel.attention import apply_attention
from fsdp2kit.parallel.context_parallel.batch import shard_batch
from fsdp2kit.parallel.context_parallel.layout import Method
from fsdp2kit.parallel.context_parallel.path import VARLEN, AttentionPath
from fsdp2kit.parallel.context_parallel.ulysses import share_heads
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.parity.rows import DealtOut, Rows

METHODS: tuple[Method, ...] = ("ulysses", "ring", "allgather")
LAYERS, HEADS, KV_HEADS, WIDTH = 2, 12, 4, 16


@dataclass(frozen=True)
class Options:
    """What is measured; `tools/bench.py context-parallel --help` explains each."""

    model: str
    seq_len: int = 4096
    pairs: int = 10
    warmup: int = 1
    layers: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class Costs:
    """Of one forward and backward pass on this rank."""

    activation_bytes: int
    """Distinct memory that autograd keeps for backward, parameters and masks aside."""
    forward: Traffic
    backward: Traffic


def bench_context_parallel(options: Options) -> dict[str, Any]:
    """Every figure, on all ranks there are. Collective.

    Raises:
        UserError: on one rank there is nothing to compare.
    """
    world = distributed.start(timeout_minutes=60)
    if world.size == 1:
        raise UserError("bench context-parallel", "needs two ranks or more", "start it with torchrun")
    source = provenance(world)
    alone = measure_costs(None, cp=1, seq_len=options.seq_len).activation_bytes
    counted = {}
    for method in METHODS:
        costs = measure_costs(method, cp=world.size, seq_len=options.seq_len)
        expected = expected_bytes(method, cp=world.size, rank=world.rank, tokens=options.seq_len // world.size)
        counted[method] = {
            "activation_ratio": costs.activation_bytes / alone,
            "bytes_per_layer": (costs.forward.total // LAYERS, costs.backward.total // LAYERS),
            "formula_per_layer": expected,
        }
    return {
        "benchmark": "context-parallel",
        "options": asdict(options),
        "cp": world.size,
        "counted": counted,
        "timed": _time_steps(options, world=world),
        "provenance": source,
    }


def measure_costs(method: Method | None, *, cp: int, seq_len: int) -> Costs:
    """What a small decoder keeps and sends for one plain causal sequence of ``seq_len`` float32 tokens. Collective."""
    world = distributed.start()
    mesh = build_mesh(MeshConfig(cp=cp), FSDPConfig(), world=world)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=HEADS * WIDTH,
        intermediate_size=2 * HEADS * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    model: Any = LlamaForCausalLM(config)
    attach_loss(model, kernel="chunked")
    path = AttentionPath(method, VARLEN if method in ("ring", "allgather") else "sdpa")
    apply_attention(model, path, group=mesh.cp_group)
    ids = torch.arange(seq_len)[None] % 128
    positions = torch.arange(seq_len)[None]
    inputs = shard_batch(
        ids,
        ids,
        positions,
        config=config,
        path=path,
        cp_rank=mesh.cp_rank,
        cp_size=cp,
        device=torch.device("cpu"),
    ).inputs()
    kept: dict[int, int] = {}
    aside = _memory_of(model, inputs)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in aside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), count_traffic() as forward:
        loss = model.loss_sum(**inputs)
    with count_traffic() as backward:
        loss.backward()
    return Costs(sum(kept.values()), forward, backward)


def expected_bytes(method: Method, *, cp: int, rank: int, tokens: int) -> tuple[int, int]:
    """Bytes that a rank with ``tokens`` float32 tokens of one sequence sends per layer: forward, backward.

    As the docstrings of `ulysses`, `ring` and `allgather` have it, for `measure_costs`' decoder.
    """
    size = 4
    if method == "ulysses":
        shares = share_heads(HEADS, KV_HEADS, cp)
        others = [share for number, share in enumerate(shares) if number != rank]
        there = sum(len(share.query) + 2 * len(share.key) for share in others)
        back = (cp - 1) * len(shares[rank].query)
        received = (cp - 1) * (len(shares[rank].query) + 2 * len(shares[rank].key))
        returned = sum(len(share.query) for share in others)
        return tokens * WIDTH * size * (there + back), tokens * WIDTH * size * (received + returned)
    numbers = tokens * KV_HEADS * 2 * WIDTH
    gradients = cp * numbers * 4 if method == "ring" else (cp - 1) * numbers * 4
    return (cp - 1) * numbers * size, (cp - 1) * numbers * size + gradients


def _memory_of(model: nn.Module, inputs: dict[str, Any]) -> set[int]:
    """Memory of parameters, buffers and masks."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for name, value in inputs.items() if name == "attention_mask" and isinstance(value, Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _time_steps(options: Options, *, world: distributed.World) -> dict[str, Any]:
    """Whole training steps, dp = world and every method at cp = world in turns, one row a rank."""
    batches = _batches(options, rows=world.size)
    sides: dict[str, Side] = {"data-parallel": _side(options, None, batches, world=world)}
    sides |= {method: _side(options, method, batches, world=world) for method in METHODS}
    courses = {name: Course() for name in sides}
    take_turns(sides, courses, options.warmup + options.pairs, world=world)
    figures = {name: course.figures(skip=options.warmup) for name, course in courses.items()}
    result: dict[str, Any] = {
        name: {**summary(side["seconds"]), "loss": side["losses"][-1]} for name, side in figures.items()
    }
    for method in METHODS:  # tokens a second over those of data parallelism
        result[method] |= compare(figures["data-parallel"]["seconds"], figures[method]["seconds"])
    return result


def _batches(options: Options, *, rows: int) -> list[Rows]:
    length, generator = options.seq_len, torch.Generator().manual_seed(0)
    found = []
    for _ in range(options.warmup + options.pairs):
        ids = torch.randint(100, (rows, length + 1), generator=generator)
        positions = torch.arange(length).expand(rows, -1).contiguous()
        found.append(Rows(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions))
    return found


def _side(options: Options, method: Method | None, batches: Sequence[Rows], *, world: distributed.World) -> OurSide:
    depth = {} if options.layers is None else {"num_hidden_layers": options.layers}
    values: dict[str, Any] = {
        "recipe": "none",
        "model": {"path": options.model, "weights": "random", "config": depth},
        "mesh": {"cp": 1 if method is None else world.size},
        "context_parallel": {"method": method or "auto"},
        "fsdp": {"param_dtype": options.dtype},
        "data": {"seq_len": options.seq_len, "pack": False},
        "train": {"steps": len(batches), "global_batch_size": world.size, "micro_batch_size": 1},
        "optimizer": {"lr": 1e-4},
    }
    config = TrainingConfig.model_validate(values)
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    dealt = DealtOut(batches, 1, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)
    return OurSide(build_trainer(config, world=world, mesh=mesh, batches=dealt, metrics_path=None), config)


def context_parallel_lines(result: dict[str, Any]) -> list[str]:
    """`bench_context_parallel`'s result for the console."""
    cp, options = result["cp"], result["options"]
    lines = [f"context parallelism: cp = {cp}, {options['seq_len']} tokens, {options['dtype']}"]
    for method, counted in result["counted"].items():
        timed = result["timed"][method]
        lines.append(
            f"  {method:<10} activations {counted['activation_ratio']:.3f} of one rank's (1/cp = {1 / cp:.3f}); "
            f"sent per layer {counted['bytes_per_layer']} bytes forward, backward (formula "
            f"{counted['formula_per_layer']}); tokens/s {timed['ratio']:.3f} × dp = {cp} "
            f"({timed['ratio_low']:.3f} – {timed['ratio_high']:.3f}), median {timed['median_seconds']:.2f} s a step"
        )
    return [*lines, *provenance_lines(result["provenance"])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py context-parallel``."""
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face directory; weights are random")
    parser.add_argument("--seq-len", type=positive, default=4096, help="tokens a sequence (4096)")
    parser.add_argument("--pairs", type=positive, default=10, help="rounds that count, each of all four ways (10)")
    parser.add_argument("--warmup", type=positive, default=1, help="rounds before those (1)")
    parser.add_argument("--layers", type=positive, default=None, help="of the model's layers, so many (all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_context_parallel(
        Options(
            model=options.model,
            seq_len=options.seq_len,
            pairs=options.pairs,
            warmup=options.warmup,
            layers=options.layers,
            dtype=options.dtype,
        )
    )
    return result, context_parallel_lines(result)
