"""How long a step takes, at the speeds of the slowest and the fastest of comparable published runs.

Time is a model with two assumptions, which every report prints: the share of the device's peak that a step's
arithmetic reaches (that of published runs, or the user's own), and the share of a link's bandwidth that collectives
reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.flops import flops_per_batch
from fsdp2kit.planner.communication import PlannedCollective
from fsdp2kit.planner.devices import Device
from fsdp2kit.planner.sizes import StepMemory
from fsdp2kit.weights.experts import is_mixture

LINK_EFFICIENCY = 0.8
"""Assumed share of a link's bandwidth while a collective runs."""
LONG = 32_768
"""From this many tokens a row, published figures of long contexts are taken."""


@dataclass(frozen=True)
class PeakShare:
    """What part of a device's dense bfloat16 peak a step's arithmetic reaches, recomputation counted."""

    low: float
    high: float
    source: str
    """The runs that reached it."""


@dataclass(frozen=True)
class Published:
    """A published run's MFU; docs/dev/memory.md has the source of each."""

    run: str
    mfu: float
    recomputes: bool
    """Whether backward computes all layers' forward again, which MFU does not count."""
    device: str = "H100"

    @property
    def share(self) -> float:
        """The MFU with recomputation counted: four passes instead of three."""
        return self.mfu * (4 / 3 if self.recomputes else 1)


PUBLISHED = {
    "dense": (
        Published("Qwen3-0.6B (prime-rl)", 0.237, recomputes=True),
        Published("Qwen3-4B (prime-rl)", 0.266, recomputes=True),
        Published("Llama 3.1 8B (torchtitan)", 0.33, recomputes=False),
        Published("Llama 3.1 8B compiled (torchtitan)", 0.39, recomputes=False),
    ),
    "dense, long context": (
        Published("Qwen3-0.6B at 65,536 (prime-rl)", 0.268, recomputes=True),
        Published("Qwen3-4B at 65,536 (prime-rl)", 0.354, recomputes=True),
    ),
    "mixture of experts": (
        Published("Qwen3-30B-A3B at 65,536 (prime-rl)", 0.154, recomputes=True, device="H200"),
        Published("Qwen3-30B-A3B (prime-rl)", 0.166, recomputes=True, device="H200"),
        Published("Qwen3-30B-A3B (NeMo Automodel)", 0.28, recomputes=False),
    ),
    "dense, on A100": (
        Published("Llama 2 70B (torchtitan)", 0.508, recomputes=False, device="A100"),
        Published("Llama 3 8B (torchtitan)", 0.568, recomputes=False, device="A100"),
        Published("Llama 3 70B (torchtitan)", 0.517, recomputes=True, device="A100"),
    ),
}
"""By kind of model; all devices but A100 are given the runs on H100 and H200."""


def published_share(config: TrainingConfig, model: PreTrainedModel, device: Device) -> PeakShare:
    """The range of published runs of models of the same kind."""
    kind = "dense"
    if is_mixture(model.config):
        kind = "mixture of experts"
    elif "A100" in device.name:
        kind = "dense, on A100"
    elif config.data.seq_len >= LONG:
        kind = "dense, long context"
    runs = sorted(PUBLISHED[kind], key=lambda run: run.share)
    slowest, fastest = (f"{run.run} on {run.device}" for run in (runs[0], runs[-1]))
    return PeakShare(runs[0].share, runs[-1].share, f"published runs ({kind}): {slowest} to {fastest}")


def own_share(
    config: TrainingConfig, step: StepMemory, sent: Sequence[PlannedCollective], device: Device, *, mfu: float
) -> PeakShare:
    """The share with which the planned step, with communication and recomputation, has the measured ``mfu``."""
    waits = _waits(step, sent, device)
    low = 0.0
    high = 1.0
    most = _pace(config, step, waits, device, high).mfu
    if most < mfu:
        what = f"{mfu:.0%} cannot be: at the device's whole peak this plan's step has an MFU of {most:.0%}"
        raise UserError("--mfu", what, "give what was measured with this TOML, on this device and as many ranks")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _pace(config, step, waits, device, middle).mfu < mfu else (low, middle)
    return PeakShare(high, high, f"an MFU of {mfu:.0%}, as given")


@dataclass(frozen=True)
class Pace:
    """A step's time in seconds at one share of the peak, and what follows from it."""

    share: float
    compute: float
    overlapped: float
    """Σ over units of the larger of compute and communication, and the optimizer."""
    serial: float
    """The same with nothing overlapped."""
    tokens_per_second: float
    """The whole job's, if overlapped."""
    mfu: float


@dataclass(frozen=True)
class Speed:
    """A step's time, between two paces."""

    share: PeakShare
    low: Pace
    high: Pace
    communication: float
    """Seconds."""
    assumptions: tuple[str, ...]


def why_untimed(config: TrainingConfig, step: StepMemory, device: Device | None) -> str | None:
    """Why no time is planned; None if it is."""
    if step.log_probs:  # no formula has what a reference computes and gathers, or what an engine does
        return "time and communication are planned for cross-entropy alone"
    if device is None or device.peak_flops is None:
        return "no time is planned without a device whose peak is known"
    if step.compute > 2:
        return f"no time is planned for fsdp.param_dtype = {config.fsdp.param_dtype!r}: the peaks are of bfloat16"
    if not step.on_device:
        return "no time is planned for fsdp.offload = 'params': the host's processors update the parameters"
    return None


def estimate_speed(
    config: TrainingConfig, step: StepMemory, sent: Sequence[PlannedCollective], device: Device, share: PeakShare
) -> Speed:
    """Time of a step of full rows of one document each; `why_untimed` must have given None."""
    assert device.peak_flops is not None, "a device whose peak is known"
    assumptions = [
        f"{device.name}: arithmetic reaches {in_range(share.low, share.high, '.0%')} of "
        f"{device.peak_flops / 1e12:,.0f} TFLOP/s, recomputation counted: {share.source}",
        f"links: {device.node_bandwidth / 1e9:,.0f} GB/s in a node, {device.network_bandwidth / 1e9:,.0f} GB/s "
        f"between nodes for each of a group's ranks on a node, {device.host_bandwidth / 1e9:,.0f} GB/s to the host, "
        f"of which {LINK_EFFICIENCY:.0%} are reached",
        "full rows of one document each; data, evaluation and saves take no time",
    ]
    if config.optimizer.name == "muon":
        assumptions.append("Muon's own matmuls and exchanges take no time")
    waits = _waits(step, sent, device)
    return Speed(
        share=share,
        low=_pace(config, step, waits, device, share.low),
        high=_pace(config, step, waits, device, share.high),
        communication=sum(waits.values()),
        assumptions=tuple(assumptions),
    )


def _waits(step: StepMemory, sent: Sequence[PlannedCollective], device: Device) -> dict[tuple[str, str], float]:
    """Seconds of communication by phase and unit.

    Experts are gathered while their layer computes; it waits for their exchanges, which are entries of their own.
    """
    waits: dict[tuple[str, str], float] = {}
    layers = {unit.name: name for name, _ in step.layers for unit in step.units if unit.name.startswith(f"{name}.")}
    for one in sent:
        name = layers[one.unit] if one.dim == "expert shard" else one.unit
        key = (one.phase, f"{name}: exchanges" if one.dim == "expert" else name)
        waits[key] = waits.get(key, 0.0) + seconds_of([one], device)
    return waits


def seconds_of(sent: Sequence[PlannedCollective], device: Device) -> float:
    """Seconds that these take one after the other."""
    return sum(one.sent / (_bandwidth(one, device) * LINK_EFFICIENCY) for one in sent)


def in_range(low: float, high: float, form: str) -> str:
    """Two numbers in a format, or one where both read the same."""
    return " to ".join(dict.fromkeys((format(low, form), format(high, form))))


def _pace(
    config: TrainingConfig, step: StepMemory, waits: dict[tuple[str, str], float], device: Device, share: float
) -> Pace:
    """The pace at one share of the peak.

    Args:
        waits: seconds of communication by phase and unit.
    """
    assert device.peak_flops is not None, "a device whose peak is known"
    computes = _computing(config, step, device, device.peak_flops * share)
    # AdamW reads parameter, gradient and two moments, and writes all but the gradient.
    update = 7 * sum(unit.trained / unit.shards for unit in step.units) * step.storage / device.memory_bandwidth
    if not step.state_on_device:  # brought from the host and taken back
        update += 2 * step.optimizer / (device.host_bandwidth * LINK_EFFICIENCY)
    # Not a set: its order, and so the last digit of a sum, changes from one process to the next.
    compute = sum(computes.values()) + update
    keys = dict.fromkeys((*computes, *waits))
    overlapped = update + sum(max(computes.get(key, 0.0), waits.get(key, 0.0)) for key in keys)
    tokens = config.train.global_batch_size * config.data.seq_len
    model_flops = flops_per_batch(step.plan.flops, tokens=tokens, attention_pairs=tokens * config.data.seq_len)
    return Pace(
        share=share,
        compute=compute,
        overlapped=overlapped,
        serial=compute + sum(waits.values()),
        tokens_per_second=tokens / overlapped,
        mfu=model_flops / step.plan.sizes.world_size / overlapped / device.peak_flops,
    )


def _bandwidth(one: PlannedCollective, device: Device) -> float:
    """Bytes a second that a rank sends in a collective.

    A ring enters and leaves each node once, and the adapters of the group's ranks there share that traffic. What one
    rank sends to one other goes through its own adapter.
    """
    if one.link == "node":
        return device.node_bandwidth
    adapters = one.on_node if one.kind in ("all_gather", "reduce_scatter", "all_reduce") else 1
    return min(device.node_bandwidth, adapters * device.network_bandwidth)


def _computing(config: TrainingConfig, step: StepMemory, device: Device, rate: float) -> dict[tuple[str, str], float]:
    """Seconds that a rank computes in a step, by phase and unit. All layers are taken to be alike.

    Args:
        rate: FLOP/s.
    """
    plan = step.plan
    section = step.plan.activation_checkpointing
    world = plan.sizes.world_size
    tokens = config.train.global_batch_size * config.data.seq_len
    linear = flops_per_batch(plan.flops, tokens=tokens, attention_pairs=0) / world
    attention = flops_per_batch(plan.flops, tokens=0, attention_pairs=tokens * config.data.seq_len) / world
    head = (6 if step.head_trained else 4) * step.hidden * step.vocabulary * tokens / world
    count = len(step.layers)
    of_forward = 1 / (3 - plan.frozen_parameters / plan.parameters)  # a third; a half where all weights are frozen
    forward = ((linear - head) * of_forward + attention / 3) / count
    backward = (linear - head + attention) / count - forward
    to_host = device.host_bandwidth * LINK_EFFICIENCY
    # The head's gradients come with its forward.
    found = {("forward", step.head): head / rate, ("backward", step.head): 0.0}
    for number, (name, layer) in enumerate(step.layers):
        again = forward if section.mode == "full" and number % section.every == 0 else 0.0
        copied = step.micro_batches * layer.kept_on_host / to_host
        found["forward", name] = forward / rate + copied
        found["backward", name] = (backward + again) / rate + copied
    return found
