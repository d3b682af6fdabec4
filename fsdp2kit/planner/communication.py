"""What a rank sends in a step, by collective, mesh dimension and link, and how long the step takes.

Counts and bytes are those of docs/fsdp.md and `context_parallel.exchange`, from the units and the mesh of the plan.
Time is a model with two assumptions, which every report prints: the share of a device's peak that matmuls reach, and
the share of a link's bandwidth that collectives reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.flops import flops_per_batch
from fsdp2kit.parallel.context_parallel.exchange import bytes_sent
from fsdp2kit.parallel.fsdp import reshards_after_forward
from fsdp2kit.planner.devices import Device
from fsdp2kit.planner.sizes import StepMemory
from fsdp2kit.planner.units import UnitSize

COMPUTE_EFFICIENCY = 0.6
"""Assumed share of the peak while a layer computes."""
LINK_EFFICIENCY = 0.8
"""Assumed share of a link's bandwidth while a collective runs."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind for one unit in one phase of a step."""

    kind: str
    """ "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "send"."""
    dim: str
    """Mesh dimension: "shard", "replicate", "cp" or "world"."""
    link: str
    """ "node" if all ranks of its group are on one, else "network"."""
    phase: str
    unit: str
    calls: int
    sent: int
    """Bytes that a rank sends in all these calls; for an all-reduce by a ring."""


def collectives(
    config: TrainingConfig, model: PreTrainedModel, step: StepMemory, *, local_world_size: int
) -> list[Collective]:
    """Everything that a rank sends in a step that is not logged, of rank 0 where ranks differ (uneven heads)."""
    sizes, fsdp, count = step.plan.sizes, step.plan.fsdp, step.micro_batches
    shards = step.shards
    replicas = sizes.world_size // shards
    shard_link = "node" if shards <= local_world_size else "network"
    replica_link = "node" if sizes.world_size <= local_world_size else "network"
    reduces = count if fsdp.reduce_every_micro_batch else 1
    found: list[Collective] = []
    frozen_so_far = True
    for unit in _in_order(step.units):
        frozen_so_far = frozen_so_far and not unit.trained
        sent = (shards - 1) * unit.whole // shards
        again = unit.gathers_in_backward and not frozen_so_far
        if shards > 1:
            forward = count if reshards_after_forward(fsdp) is not False or unit.reshard is not False else 1
            found.append(Collective("all_gather", "shard", shard_link, "forward", unit.name, forward, forward * sent))
            if unit.reshard is not False and again:
                few = unit.reshard if type(unit.reshard) is int else shards
                back = count * ((few - 1) * unit.whole // few)
                found.append(Collective("all_gather", "shard", shard_link, "backward", unit.name, count, back))
        if not unit.trained:
            continue
        reduced = unit.trained * step.reduce
        if shards > 1:
            sent = reduces * ((shards - 1) * reduced // shards)
            found.append(Collective("reduce_scatter", "shard", shard_link, "backward", unit.name, reduces, sent))
        if replicas > 1:
            sent = reduces * (2 * (replicas - 1) * (reduced // shards) // replicas)
            found.append(Collective("all_reduce", "replicate", replica_link, "backward", unit.name, reduces, sent))
    return [*found, *_exchanges(config, model, step, local_world_size), *_numbers(config, step, local_world_size)]


def _in_order(units: Sequence[UnitSize]) -> list[UnitSize]:
    """In the order of a forward pass, the root (whose norm comes before the head) last: what precedes it is known."""
    return [*units[1:], units[0]]


def _exchanges(
    config: TrainingConfig, model: PreTrainedModel, step: StepMemory, local_world_size: int
) -> Iterator[Collective]:
    """Of context parallelism; attention is exchanged again where a layer is recomputed."""
    cp, method = step.plan.sizes.cp, step.plan.attention.method
    if method is None:
        return
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    link = "node" if cp <= local_world_size else "network"
    kind = {"ulysses": "all_to_all", "ring": "send", "allgather": "all_gather"}[method]
    section = step.plan.activation_checkpointing
    for number, _ in enumerate(decoder_layers(model)):
        forward, backward = bytes_sent(
            method, heads=heads, key_heads=key_heads, width=width, tokens=step.tokens, cp=cp, item=step.compute
        )
        # "selective" keeps the result of a ring or an all-gather, which are one operator, but not of Ulysses.
        repeats = section.mode == "full" or (section.mode == "selective" and method == "ulysses")
        times = step.micro_batches * (2 if repeats and number % section.every == 0 else 1)
        name = step.layers[number][0]
        calls = {"ulysses": 2, "ring": 2 * (cp - 1), "allgather": 1}[method]
        yield Collective(kind, "cp", link, "forward", name, times * calls, times * forward)
        calls = {"ulysses": 2, "ring": 2 * (cp - 1) + 2 * cp, "allgather": 1}[method]
        if method == "allgather":  # keys and values are gathered again, their gradients reduced
            gathered = step.micro_batches * forward
            yield Collective("all_gather", "cp", link, "backward", name, step.micro_batches, gathered)
            kind_back, backward = "reduce_scatter", backward - forward
        else:
            kind_back = kind
        times = step.micro_batches
        yield Collective(kind_back, "cp", link, "backward", name, times * calls, times * backward)


def _numbers(config: TrainingConfig, step: StepMemory, local_world_size: int) -> Iterator[Collective]:
    """The few numbers of every step: what the batch is made of, the loss, the norms of the gradients."""
    world = step.plan.sizes.world_size
    if world == 1:
        return
    link = "node" if world <= local_world_size else "network"
    numbers = 9 + len(config.data.sources)
    yield Collective("all_reduce", "world", link, "batch", "", 1, 2 * (world - 1) * numbers * 8 // world)
    losses = 1 + len(config.data.sources)
    yield Collective("all_reduce", "world", link, "optimizer", "", 1, 2 * (world - 1) * losses * 4 // world)
    if step.shards > 1:
        tensors = sum(unit.tensors for unit in step.units)
        item = 8 if step.plan.device_type == "cpu" else 4  # the host adds squares up in float64
        sent = 2 * (step.shards - 1) * item * tensors // step.shards
        shard_link = "node" if step.shards <= local_world_size else "network"
        yield Collective("all_reduce", "shard", shard_link, "optimizer", "", 1, sent)


@dataclass(frozen=True)
class Speed:
    """A step's time, in seconds, and what follows from it."""

    compute: float
    communication: float
    overlapped: float
    """Σ over units of the larger of compute and communication, and the optimizer."""
    serial: float
    """The same with nothing overlapped."""
    tokens_per_second: float
    """Of the whole job, if overlapped."""
    mfu: float
    assumptions: tuple[str, ...]


def estimate_speed(
    config: TrainingConfig, step: StepMemory, sent: Sequence[Collective], device: Device
) -> Speed | None:
    """Time of a step of full rows of one document each; None for a device whose peak is not known."""
    if device.peak_flops is None:
        return None
    rows = config.train.global_batch_size
    tokens, pairs = rows * config.data.seq_len, rows * config.data.seq_len**2
    world = step.plan.sizes.world_size
    model_flops = flops_per_batch(step.plan.flops, tokens=tokens, attention_pairs=pairs) / world
    section = step.plan.activation_checkpointing
    recomputes = section.mode == "full"
    by_unit: dict[tuple[str, str], float] = {}
    of_layers = [name for name, _ in step.layers]
    head = 6 * step.hidden * step.vocabulary * tokens / world
    each = (model_flops - head) / len(of_layers)
    rate = device.peak_flops * COMPUTE_EFFICIENCY
    for number, name in enumerate(of_layers):
        again = each / 3 if recomputes and number % section.every == 0 else 0.0
        by_unit["forward", name], by_unit["backward", name] = each / 3 / rate, (each * 2 / 3 + again) / rate
    by_unit["forward", step.head], by_unit["backward", step.head] = head / rate, 0.0  # its gradients come with it
    waits: dict[tuple[str, str], float] = {}
    for one in sent:
        bandwidth = device.node_bandwidth if one.link == "node" else device.network_bandwidth
        key = (one.phase, one.unit)
        waits[key] = waits.get(key, 0.0) + one.sent / (bandwidth * LINK_EFFICIENCY)
    elements = sum(unit.trained for unit in step.units) / step.shards
    # AdamW reads parameter, gradient and two moments, and writes all but the gradient.
    update = 7 * elements * step.storage / device.memory_bandwidth
    compute, communication = sum(by_unit.values()) + update, sum(waits.values())
    keys = by_unit.keys() | waits.keys()
    overlapped = update + sum(max(by_unit.get(key, 0.0), waits.get(key, 0.0)) for key in keys)
    return Speed(
        compute=compute,
        communication=communication,
        overlapped=overlapped,
        serial=compute + communication,
        tokens_per_second=tokens / overlapped,
        mfu=model_flops / overlapped / device.peak_flops,
        assumptions=(
            f"{device.name}: layers reach {COMPUTE_EFFICIENCY:.0%} of {device.peak_flops / 1e12:,.0f} TFLOP/s",
            f"links: {device.node_bandwidth / 1e9:,.0f} GB/s in a node, {device.network_bandwidth / 1e9:,.0f} GB/s "
            f"between nodes, of which collectives reach {LINK_EFFICIENCY:.0%}",
            "full rows of one document each; data, evaluation and saves take no time",
        ),
    )
