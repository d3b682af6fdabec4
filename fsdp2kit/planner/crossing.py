"""What it costs that groups of ranks cross nodes, in words, from the figures of `communication` and `speed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.console import size_text
from fsdp2kit.job.layout import Layout
from fsdp2kit.planner.communication import Collective, collectives
from fsdp2kit.planner.devices import ALLOWANCE, GIB, Device
from fsdp2kit.planner.memory import step_moments
from fsdp2kit.planner.sizes import StepMemory, step_memory
from fsdp2kit.planner.speed import seconds_of


def price_crossings(
    config: TrainingConfig,
    model: PreTrainedModel,
    step: StepMemory,
    sent: Sequence[Collective],
    *,
    layout: Layout,
    device: Device | None,
) -> dict[str, str]:
    """The prices that `Layout.warnings` takes. Without a device whose links are known, in bytes alone.

    Args:
        sent: what a rank sends in a step; empty if that is not planned, and then nothing has a price.
    """
    found: dict[str, str] = {}
    for dim in ("cp", "expert", "shard"):
        over = [one for one in sent if one.dim == dim and one.link == "network"]
        if not over:
            continue
        found[dim] = f"{size_text(sum(one.sent for one in over))} a step and rank over the network"
        if device is not None:
            within = [replace(one, link="node") for one in over]
            more = seconds_of(over, device) - seconds_of(within, device)
            found[dim] += f", about {more:.2g} s more than within a node"
            found[dim] += ", in part beside compute" if dim == "shard" else ""
    if "shard" in found and (hybrid := _price_hybrid(config, model, step, layout=layout, device=device)):
        found["hybrid"] = hybrid
    return found


def _price_hybrid(
    config: TrainingConfig, model: PreTrainedModel, step: StepMemory, *, layout: Layout, device: Device | None
) -> str | None:
    """What hybrid sharding would send over the network, and take of memory."""
    sizes = layout.hybrid()
    if sizes is None:
        return None
    fsdp = step.plan.fsdp.model_copy(update={"strategy": "hybrid_shard"})
    plan = replace(step.plan, sizes=sizes, fsdp=fsdp)
    other = step_memory(config, model, plan, [layer for _, layer in step.layers])
    sent = collectives(config, model, other, layout=replace(layout, sizes=sizes, fsdp=fsdp))
    over = [one for one in sent if one.dim in ("shard", "replicate") and one.link == "network"]
    seconds = "" if device is None else f", about {seconds_of(over, device):.2g} s"
    peaks = [max(moment.total for moment in step_moments(one)) for one in (other, step)]
    text = f": {size_text(sum(one.sent for one in over))}{seconds}, with {(peaks[0] - peaks[1]) / GIB:.1f} GiB more"
    if device is not None and peaks[0] + ALLOWANCE > device.memory:
        text += f", which does not fit ({(peaks[0] + ALLOWANCE) / GIB:.1f} of {device.memory / GIB:.1f})"
    return text
