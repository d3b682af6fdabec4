"""What a rank sends in a step, by collective, mesh dimension and link.

Counts and bytes follow from the plan's units and mesh, by the formulae of docs/fsdp.md and
`context_parallel.exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.job.layout import Layout
from fsdp2kit.model.flops import attention_layers
from fsdp2kit.model.inspect import value_of
from fsdp2kit.parallel.context_parallel.exchange import bytes_sent
from fsdp2kit.parallel.context_parallel.recurrent import find_recurrent
from fsdp2kit.parallel.context_parallel.recurrent_checks import measure
from fsdp2kit.parallel.fsdp import reshards_after_forward
from fsdp2kit.planner.sizes import StepMemory


@dataclass(frozen=True)
class PlannedCollective:
    """Collectives of one kind for one unit in one phase of a step."""

    kind: str
    """ "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "send"."""
    dim: str
    """Mesh dimension: "shard", "replicate", "cp" or "world"; of partitioned experts "expert", over which they
    are, and "expert shard", over which each rank's are sharded."""
    link: str
    """ "node" if every group of that dimension is on one node, else "network"."""
    on_node: int
    """Fewest ranks of a group that share a node. Each has a network adapter of its own."""
    phase: str
    unit: str
    calls: int
    sent: int
    """Bytes that a rank sends in all these calls; an all-reduce is taken to be a ring."""


def collectives(
    config: TrainingConfig, model: PreTrainedModel, step: StepMemory, *, layout: Layout
) -> list[PlannedCollective]:
    """Everything that a rank sends in a step that is not logged. Where ranks differ (uneven heads), it is rank 0.

    Tokens are taken to be routed evenly.
    """
    fsdp = step.plan.fsdp
    count = step.micro_batches
    shards = step.shards
    world = step.plan.sizes.world_size
    replicas = step.replicas
    ep = step.plan.sizes.ep
    reduces = count if fsdp.accumulates_shards else 1
    found: list[PlannedCollective] = []
    places: dict[tuple[str, int], tuple[str, int]] = {}

    def add(kind: str, dim: str, phase: str, unit: str, calls: int, sent: int, *, ranks: int) -> None:
        if ranks > 1:
            if (dim, ranks) not in places:
                span = layout.span(ranks, apart={"replicate": shards, "expert shard": ep}.get(dim, 1))
                places[dim, ranks] = "network" if span.crossing else "node", span.on_node
            found.append(PlannedCollective(kind, dim, *places[dim, ranks], phase, unit, calls, sent))

    frozen_so_far = True
    # In the order of forward. The root comes last: its final norm runs after all layers.
    for unit in [*step.units[1:], step.units[0]]:
        frozen_so_far = frozen_so_far and not unit.trained
        dim = "expert shard" if unit.experts else "shard"
        ranks = unit.shards
        calls = count if reshards_after_forward(fsdp) is not False or unit.reshard is not False else 1
        sent = calls * ((ranks - 1) * unit.whole // ranks)
        add("all_gather", dim, "forward", unit.name, calls, sent, ranks=ranks)
        if ranks > 1 and unit.gathered_again and not frozen_so_far:
            few = unit.reshard if type(unit.reshard) is int else ranks
            back = count * ((few - 1) * unit.whole // few)
            add("all_gather", dim, "backward", unit.name, count, back, ranks=few)
        if unit.trained:
            reduced = unit.trained * step.reduce
            sent = reduces * ((ranks - 1) * reduced // ranks)
            add("reduce_scatter", dim, "backward", unit.name, reduces, sent, ranks=ranks)
            sent = 2 * (replicas - 1) * (reduced // ranks) // replicas
            add("all_reduce", "replicate", "backward", unit.name, 1, sent, ranks=replicas)
    for exchange in _exchanges(model, step, rows=config.train.micro_batch_size):
        add(*exchange, ranks=step.plan.sizes.cp)
    for exchange in _dispatches(step):
        add(*exchange, ranks=ep)
    # Single numbers of every step: what the batch is made of, the loss, the square of the gradients' norm.
    numbers = 10 + len(config.data.sources)
    losses = 1 + len(config.data.sources)
    add("all_reduce", "world", "batch", "", 1, 2 * (world - 1) * numbers * 8 // world, ranks=world)
    add("all_reduce", "world", "optimizer", "", 1, 2 * (world - 1) * losses * 4 // world, ranks=world)
    item = 8 if step.plan.device_type == "cpu" else 4  # a CPU sums the squares in float64
    sent = 2 * (shards - 1) * item // shards
    add("all_reduce", "shard", "optimizer", "", 1, sent, ranks=shards)
    return found


def _exchanges(
    model: PreTrainedModel, step: StepMemory, *, rows: int
) -> Iterator[tuple[str, str, str, str, int, int]]:
    """Context parallelism's; a layer that is recomputed exchanges again."""
    cp = step.plan.sizes.cp
    method = step.plan.attention.method
    count = step.micro_batches
    if method is None:
        return
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    key_heads = value_of(text, "num_key_value_heads") or heads
    width = value_of(text, "head_dim") or text.hidden_size // heads
    forward, backward = bytes_sent(
        method, heads=heads, key_heads=key_heads, width=width, tokens=step.tokens, cp=cp, item=step.compute
    )
    kind = {"ulysses": "all_to_all", "ring": "send", "allgather": "all_gather"}[method]
    calls = {"ulysses": 2, "ring": 2 * (cp - 1), "allgather": 1}[method]
    section = step.plan.activation_checkpointing
    # "selective" keeps the result of a ring or an all-gather, which is one operator, but not that of Ulysses.
    repeats = section.mode == "full" or (section.mode == "selective" and method == "ulysses")
    attention = attention_layers(text)
    for number, (name, _) in enumerate(step.layers):
        recomputed = section.mode != "none" and number % section.every == 0
        yield from _recurrent_exchanges(model, step, name, rows=rows, repeats=recomputed)
        if number not in attention:
            continue
        times = count * (2 if repeats and number % section.every == 0 else 1)
        yield kind, "cp", "forward", name, times * calls, times * forward
        if method == "allgather":  # keys and values are gathered again, their gradients reduced
            yield kind, "cp", "backward", name, count, count * forward
            yield "reduce_scatter", "cp", "backward", name, count, count * (backward - forward)
        else:
            back = calls + (2 * cp if method == "ring" else 0)
            yield kind, "cp", "backward", name, count * back, count * backward


def _recurrent_exchanges(
    model: PreTrainedModel, step: StepMemory, name: str, *, rows: int, repeats: bool
) -> Iterator[tuple[str, str, str, str, int, int]]:
    """Those of a layer that carries a state: few tokens for the convolution, heads for the scan."""
    cp = step.plan.sizes.cp
    count = step.micro_batches
    place: dict[str, int] = {
        "rows": rows,
        "tokens": step.tokens,
        "chunks": 1 if step.plan.attention.method == "ulysses" else 2,
        "cp": cp,
    }
    for module in find_recurrent(model.get_submodule(name)).values():
        shape = measure(module, model, dtype=getattr(torch, step.plan.fsdp.param_dtype))
        tails, _ = replace(shape, heads=0).bytes_sent(**place)
        forward, backward = shape.bytes_sent(**place)
        times = count * (2 if repeats else 1)
        yield "all_gather", "cp", "forward", name, times, times * tails
        yield "reduce_scatter", "cp", "backward", name, count, count * tails
        if shape.heads:
            calls = shape.dtypes + 1
            yield "all_to_all", "cp", "forward", name, times * calls, times * (forward - tails)
            yield "all_to_all", "cp", "backward", name, count * calls, count * (backward - tails)


def _dispatches(step: StepMemory) -> Iterator[tuple[str, str, str, str, int, int]]:
    """What layers of experts send; one that is wholly recomputed sends its forward's again."""
    section = step.plan.activation_checkpointing
    count = step.micro_batches
    for number, (name, _) in enumerate(step.layers):
        if (dispatch := step.dispatch.get(name)) is None:
            continue
        forward, backward = dispatch.exchanges()
        times = count * (2 if section.mode == "full" and number % section.every == 0 else 1)
        yield "all_to_all", "expert", "forward", name, times * len(forward), times * sum(forward)
        yield "all_to_all", "expert", "backward", name, count * len(backward), count * sum(backward)
