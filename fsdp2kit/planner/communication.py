"""What a rank sends in a step, by collective, mesh dimension and link, and how long the step takes.

Counts and bytes are those of docs/fsdp.md and `context_parallel.exchange`, from the units and the mesh of the plan.
Time is a model with two assumptions, which every report prints: the share of a device's peak that matmuls reach, and
the share of a link's bandwidth that collectives reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.model.flops import flops_per_batch
from fsdp2kit.parallel.context_parallel.exchange import bytes_sent
from fsdp2kit.parallel.fsdp import reshards_after_forward
from fsdp2kit.planner.devices import Device
from fsdp2kit.planner.sizes import StepMemory

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
    on_node: int
    """Ranks of its group that share a node, each with a network adapter of its own."""
    phase: str
    unit: str
    calls: int
    sent: int
    """Bytes that a rank sends in all these calls; for an all-reduce by a ring."""


def collectives(
    config: TrainingConfig, model: PreTrainedModel, step: StepMemory, *, local_world_size: int
) -> list[Collective]:
    """Everything that a rank sends in a step that is not logged, of rank 0 where ranks differ (uneven heads)."""
    fsdp, count, shards, world = step.plan.fsdp, step.micro_batches, step.shards, step.plan.sizes.world_size
    replicas = step.replicas
    reduces = count if fsdp.accumulates_shards else 1
    found: list[Collective] = []

    def add(kind: str, dim: str, phase: str, unit: str, calls: int, sent: int, *, ranks: int) -> None:
        on = place(ranks, apart=shards if dim == "replicate" else 1, local_world_size=local_world_size)
        if ranks > 1:
            found.append(Collective(kind, dim, *on, phase, unit, calls, sent))

    frozen_so_far = True
    # In the order of a forward pass, the root (whose norm comes before the head) last: what precedes it is known.
    for unit in [*step.units[1:], step.units[0]]:
        frozen_so_far = frozen_so_far and not unit.trained
        calls = count if reshards_after_forward(fsdp) is not False or unit.reshard is not False else 1
        sent = calls * ((shards - 1) * unit.whole // shards)
        add("all_gather", "shard", "forward", unit.name, calls, sent, ranks=shards)
        if shards > 1 and unit.gathered_again and not frozen_so_far:
            few = unit.reshard if type(unit.reshard) is int else shards
            back = count * ((few - 1) * unit.whole // few)
            add("all_gather", "shard", "backward", unit.name, count, back, ranks=few)
        if unit.trained:
            reduced = unit.trained * step.reduce
            sent = reduces * ((shards - 1) * reduced // shards)
            add("reduce_scatter", "shard", "backward", unit.name, reduces, sent, ranks=shards)
            sent = 2 * (replicas - 1) * (reduced // shards) // replicas
            add("all_reduce", "replicate", "backward", unit.name, 1, sent, ranks=replicas)
    for exchange in _exchanges(model, step):
        add(*exchange, ranks=step.plan.sizes.cp)
    # The few numbers of every step: what the batch is made of, the loss, the norms of the gradients.
    numbers, losses = 9 + len(config.data.sources), 1 + len(config.data.sources)
    add("all_reduce", "world", "batch", "", 1, 2 * (world - 1) * numbers * 8 // world, ranks=world)
    add("all_reduce", "world", "optimizer", "", 1, 2 * (world - 1) * losses * 4 // world, ranks=world)
    tensors = sum(len(unit.gradient_sizes) for unit in step.units)
    item = 8 if step.plan.device_type == "cpu" else 4  # the host adds squares up in float64
    sent = 2 * (shards - 1) * item * tensors // shards
    add("all_reduce", "shard", "optimizer", "", 1, sent, ranks=shards)
    return found


def place(ranks: int, *, apart: int = 1, local_world_size: int) -> tuple[str, int]:
    """The link of a group of ranks, and how many of them share a node.

    Args:
        ranks: in the group.
        apart: from one of them to the next, in ranks of the job.
    """
    if ranks * apart <= local_world_size:
        return "node", ranks
    return "network", min(ranks, max(1, local_world_size // apart))


def _exchanges(model: PreTrainedModel, step: StepMemory) -> Iterator[tuple[str, str, str, str, int, int]]:
    """Of context parallelism; attention is exchanged again where a layer is recomputed."""
    cp, method, count = step.plan.sizes.cp, step.plan.attention.method, step.micro_batches
    if method is None:
        return
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    forward, backward = bytes_sent(
        method, heads=heads, key_heads=key_heads, width=width, tokens=step.tokens, cp=cp, item=step.compute
    )
    kind = {"ulysses": "all_to_all", "ring": "send", "allgather": "all_gather"}[method]
    calls = {"ulysses": 2, "ring": 2 * (cp - 1), "allgather": 1}[method]
    section = step.plan.activation_checkpointing
    # "selective" keeps the result of a ring or an all-gather, which are one operator, but not of Ulysses.
    repeats = section.mode == "full" or (section.mode == "selective" and method == "ulysses")
    for number, (name, _) in enumerate(step.layers):
        times = count * (2 if repeats and number % section.every == 0 else 1)
        yield kind, "cp", "forward", name, times * calls, times * forward
        if method == "allgather":  # keys and values are gathered again, their gradients reduced
            yield kind, "cp", "backward", name, count, count * forward
            yield "reduce_scatter", "cp", "backward", name, count, count * (backward - forward)
        else:
            back = calls + (2 * cp if method == "ring" else 0)
            yield kind, "cp", "backward", name, count * back, count * backward


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


def why_untimed(config: TrainingConfig, step: StepMemory, device: Device | None) -> str | None:
    """Why no time is planned; None if it is."""
    if step.log_probs:  # what a reference gathers and computes, and what an engine does, no formula describes
        return "time and communication are planned for cross-entropy alone"
    if device is None or device.peak_flops is None:
        return "no time is planned without a device whose peak is known"
    if step.compute > 2:
        return f"no time is planned for fsdp.param_dtype = {config.fsdp.param_dtype!r}: the peaks are of bfloat16"
    if not step.on_device:
        return "no time is planned for fsdp.offload = 'params': the host's processors update the parameters"
    return None


def estimate_speed(config: TrainingConfig, step: StepMemory, sent: Sequence[Collective], device: Device) -> Speed:
    """Time of a step of full rows of one document each, where `why_untimed` knows no reason against it."""
    assert device.peak_flops is not None, "a device whose peak is known"
    tokens = config.train.global_batch_size * config.data.seq_len
    world = step.plan.sizes.world_size
    computes = _computing(config, step, device)
    waits: dict[tuple[str, str], float] = {}
    for one in sent:
        key = (one.phase, one.unit)
        waits[key] = waits.get(key, 0.0) + one.sent / (_bandwidth(one, device) * LINK_EFFICIENCY)
    elements = sum(unit.trained for unit in step.units) / step.shards
    # AdamW reads parameter, gradient and two moments, and writes all but the gradient.
    update = 7 * elements * step.storage / device.memory_bandwidth
    if not step.state_on_device:  # brought from the host and taken back
        update += 2 * step.optimizer / (device.host_bandwidth * LINK_EFFICIENCY)
    compute, communication = sum(computes.values()) + update, sum(waits.values())
    keys = computes.keys() | waits.keys()
    overlapped = update + sum(max(computes.get(key, 0.0), waits.get(key, 0.0)) for key in keys)
    model_flops = flops_per_batch(step.plan.flops, tokens=tokens, attention_pairs=tokens * config.data.seq_len)
    assumptions = [
        f"{device.name}: layers reach {COMPUTE_EFFICIENCY:.0%} of {device.peak_flops / 1e12:,.0f} TFLOP/s",
        f"links: {device.node_bandwidth / 1e9:,.0f} GB/s in a node, {device.network_bandwidth / 1e9:,.0f} GB/s "
        f"between nodes for each of a group's ranks on a node, {device.host_bandwidth / 1e9:,.0f} GB/s to the host, "
        f"of which {LINK_EFFICIENCY:.0%} are reached",
        "full rows of one document each; data, evaluation and saves take no time",
    ]
    if config.optimizer.name == "muon":
        assumptions.append("Muon's own matmuls and exchanges take no time")
    return Speed(
        compute=compute,
        communication=communication,
        overlapped=overlapped,
        serial=compute + communication,
        tokens_per_second=tokens / overlapped,
        mfu=model_flops / world / overlapped / device.peak_flops,
        assumptions=tuple(assumptions),
    )


def _bandwidth(one: Collective, device: Device) -> float:
    """Bytes a second that a rank sends in a collective.

    A ring goes through each node once, and its traffic there is shared by the adapters of the group's ranks. What one
    rank sends to one other passes its own adapter.
    """
    if one.link == "node":
        return device.node_bandwidth
    adapters = one.on_node if one.kind in ("all_gather", "reduce_scatter", "all_reduce") else 1
    return min(device.node_bandwidth, adapters * device.network_bandwidth)


def _computing(config: TrainingConfig, step: StepMemory, device: Device) -> dict[tuple[str, str], float]:
    """Seconds that a rank computes in a step, by phase and unit; layers are taken to be alike."""
    plan, section = step.plan, step.plan.activation_checkpointing
    world, tokens = plan.sizes.world_size, config.train.global_batch_size * config.data.seq_len
    linear = flops_per_batch(plan.flops, tokens=tokens, attention_pairs=0) / world
    attention = flops_per_batch(plan.flops, tokens=0, attention_pairs=tokens * config.data.seq_len) / world
    head = (6 if step.head_trained else 4) * step.hidden * step.vocabulary * tokens / world
    count = len(step.layers)
    # Of three matmuls a weight, a frozen one has two: the share of forward is a third to a half.
    of_forward = 1 / (3 - plan.frozen_parameters / plan.parameters)
    forward = ((linear - head) * of_forward + attention / 3) / count
    backward = (linear - head + attention) / count - forward
    rate = (device.peak_flops or math.nan) * COMPUTE_EFFICIENCY
    to_host = device.host_bandwidth * LINK_EFFICIENCY
    # The head's gradients come with its forward.
    found = {("forward", step.head): head / rate, ("backward", step.head): 0.0}
    for number, (name, layer) in enumerate(step.layers):
        again = forward if section.mode == "full" and number % section.every == 0 else 0.0
        copied = step.micro_batches * layer.kept_on_host / to_host
        found["forward", name] = forward / rate + copied
        found["backward", name] = (backward + again) / rate + copied
    return found
