"""One training step's collectives beside the formulae of docs/fsdp.md, and how often the host waits in it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fsdp2kit import distributed
from fsdp2kit.bench.figures import provenance, provenance_lines
from fsdp2kit.bench.host_syncs import count_host_syncs, host_tensors
from fsdp2kit.bench.synthetic import SyntheticBatches, Workload
from fsdp2kit.bench.traffic import Traffic, count_traffic
from fsdp2kit.bench.trainer import build_trainer
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.fsdp import reshards_after_forward
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.parallel.units import Unit, plan_units
from fsdp2kit.train.global_batch import next_batch
from fsdp2kit.train.loop import train_step

# A vocabulary larger than a layer, and untied, as in models where it matters what travels with it.
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HOST_NUMBERS = 7  # what a global batch is made of, float64


@dataclass(frozen=True)
class Options:
    """What is counted."""

    model: str | None = None
    """Hugging Face directory, whose shape is taken; None: a small Llama."""
    strategy: str = "full_shard"
    micro_batches: int = 2
    seq_len: int = 64
    tied: bool = False
    """Of the small Llama: whether its head is its embedding."""


def bench_traffic(options: Options) -> dict[str, Any]:
    """Count the second of two steps; every rank calls this.

    Returns:
        Calls and bytes that this rank sends, by kind, counted and by the formulae, and whether they are the same; the
        bytes of its largest reduce-scatter; the waits of the host.
    """
    world = distributed.start()
    source = provenance(world)
    config = _config(options, ranks=world.size)
    workload = Workload(seq_len=options.seq_len, rows=1, micro_batches=options.micro_batches, steps=2)
    whole = build_model(config.model)
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    formula = expected_traffic(
        config.fsdp, whole, sizes=mesh.sizes, micro_batches=options.micro_batches, on_cuda=world.device.type == "cuda"
    )
    batches = SyntheticBatches(whole.config.vocab_size, workload)
    trainer = build_trainer(config, world=world, mesh=mesh, batches=batches, metrics_path=None)
    for index in range(2):
        with count_traffic() as traffic:
            batch = next_batch(batches, index, stop=False, cp_size=1)
            known = host_tensors(batch.micro_batches, trainer.optimizer)
            with count_host_syncs(world.device, host=known) as syncs:
                train_step(
                    trainer.model,
                    trainer.optimizer,
                    trainer.schedule,
                    batch,
                    trainer.to_device,
                    plan=trainer.plan,
                    step=index + 1,
                )
    return {
        "benchmark": "traffic",
        "options": asdict(options),
        "counted": {"calls": traffic.calls, "sent": traffic.sent},
        "formula": {"calls": formula.calls, "sent": formula.sent},
        "values_equal": traffic == formula,
        "largest_reduce_scatter": traffic.largest.get("reduce_scatter", 0),
        "host_syncs": {"count": syncs.count, "places": syncs.places},
        "provenance": source,
    }


def expected_traffic(
    section: FSDPConfig, model: PreTrainedModel, *, sizes: MeshSizes, micro_batches: int, on_cuda: bool
) -> Traffic:
    """The formulae of docs/fsdp.md for one step without context parallelism, on a model that trains all it has.

    Args:
        model: before it is sharded; it may be on meta.
        on_cuda: the norms of the gradients are float32 there, and float64 on a CPU.
    """
    ranks = sizes.dp_replicate * sizes.dp_shard
    shards = 1 if section.strategy == "no_shard" else sizes.dp_shard
    replicas = ranks // shards
    units = plan_units(section, model)
    head = model.get_output_embeddings()
    frees = reshards_after_forward(section) is True
    reduces = micro_batches if section.reduce_every_micro_batch else 1
    traffic = Traffic()
    for unit in units:
        elements = _padded(unit, units, shards)
        freed = not (unit.is_root or unit.module is head or isinstance(unit.module, nn.Embedding))
        gathers = micro_batches * (2 if freed else 1) if frees else 1
        for _ in range(gathers if shards > 1 else 0):
            traffic.add("all_gather", (shards - 1) * elements // shards * _BYTES[section.param_dtype])
        for _ in range(reduces):
            reduced = elements // shards * _BYTES[section.reduce_dtype]
            if shards > 1:
                traffic.add("reduce_scatter", (shards - 1) * reduced)
            if replicas > 1:
                traffic.add("all_reduce", 2 * (replicas - 1) * reduced // replicas)
    if ranks > 1:
        traffic.add("all_reduce", 2 * (ranks - 1) * 8 * _HOST_NUMBERS // ranks)
        traffic.add("all_reduce", 2 * (ranks - 1) * 4 // ranks)  # the loss
    if shards > 1:
        norms = len(list(model.parameters())) * (4 if on_cuda else 8)
        traffic.add("all_reduce", 2 * (shards - 1) * norms // shards)
    return traffic


def _padded(unit: Unit, units: list[Unit], shards: int) -> int:
    """Elements of what the unit itself holds, each parameter's first dimension padded to a multiple of ``shards``."""
    inner = {
        id(p) for other in units if other is not unit and _is_inside(other, unit) for p in other.module.parameters()
    }
    own = [parameter for parameter in unit.module.parameters() if id(parameter) not in inner]
    return sum(math.ceil(p.shape[0] / shards) * shards * math.prod(p.shape[1:]) for p in own)


def _is_inside(inner: Unit, outer: Unit) -> bool:
    return outer.is_root or inner.name.startswith(f"{outer.name}.")


def _config(options: Options, *, ranks: int) -> TrainingConfig:
    model = (
        {"config": SMALL | {"tie_word_embeddings": options.tied}} if options.model is None else {"path": options.model}
    )
    return TrainingConfig.model_validate(
        {
            "recipe": "bench",
            "model": {**model, "weights": "random", "attention": "varlen"},
            "fsdp": {"strategy": options.strategy},
            "data": {"seq_len": options.seq_len},
            "train": {
                "steps": 2,
                "global_batch_size": ranks * options.micro_batches,
                "micro_batch_size": 1,
            },
        }
    )


def traffic_lines(result: dict[str, Any]) -> list[str]:
    """`bench_traffic`'s result as a table."""
    counted, formula = result["counted"], result["formula"]
    lines = [
        "| collective | calls | by the formula | bytes a rank sends | by the formula |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in sorted({*counted["calls"], *formula["calls"]}):
        figures = [side[what].get(kind, 0) for what in ("calls", "sent") for side in (counted, formula)]
        lines.append(f"| {kind} | " + " | ".join(f"{figure:,}" for figure in figures) + " |")
    syncs = result["host_syncs"]
    return [
        *lines,
        "",
        "as the formulae say" if result["values_equal"] else "NOT what the formulae say",
        f"largest reduce-scatter: {result['largest_reduce_scatter']:,} bytes sent",
        f"host synchronisations in the step: {syncs['count']}",
        *(f"  {place}" for place in syncs["places"]),
        *provenance_lines(result["provenance"]),
    ]
