"""A first TOML on its machine: what to change so that it fits into the devices, and how to launch it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsdp2kit.config.schema import ModelConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.planner.devices import GIB, Device
from fsdp2kit.planner.report import as_overrides
from fsdp2kit.planner.search import Candidate, Search, Values, changed

_PER_NODE = 8
_MODES = ("none", "selective", "full")
_CLOSE = 0.03  # candidates whose speeds differ by less than this are as fast as each other


@dataclass(frozen=True)
class Fit:
    """What a plan says."""

    values: Values
    """What to set, by ``section.key``."""
    words: str
    """What the plan was made for, and what it needs there."""
    warning: str | None = None
    """That it does not fit, and what would."""


def nodes_of(world_size: int) -> tuple[int, int]:
    """Nodes, and ranks of each: as few nodes as possible with the same number of ranks, at most 8."""
    nodes = next(
        count for count in range(1, world_size + 1) if not world_size % count and world_size // count <= _PER_NODE
    )
    return nodes, world_size // nodes


def launch_command(toml: str, world_size: int) -> str:
    """What starts the run on so many ranks; HOST is the first node."""
    nodes, local = nodes_of(world_size)
    name = shlex.quote(toml)
    if world_size == 1:
        return f"python -m fsdp2kit.run {name}"
    meeting = f"--nnodes {nodes} " if nodes > 1 else ""
    place = "--rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else ""
    return f"torchrun {meeting}--nproc-per-node {local} {place}-m fsdp2kit.run {name}"


def find_fit(config: TrainingConfig, device: Device, *, world_size: int) -> Fit:
    """The fastest of what fits, as ``plan --sweep`` finds it; where no time is planned, the cheapest change that fits.

    Raises:
        UserError: the model cannot be planned.
    """
    nodes, local = nodes_of(world_size)
    config, device = _without_teacher(config, device, world_size)
    search = Search(config, world_size, device, local)
    fitting = [one for one in search.fit() if one.estimate.fits]
    own = [one for one in fitting if one.world_size == world_size]
    timed = list(_timed(search, nodes)) if not own or own[0].estimate.speed is not None else []
    if best := _fastest(timed):
        return Fit(_mesh_whole(best.values), _words(best))
    if own:
        return Fit(_mesh_whole(own[0].values), _words(own[0]))
    # Nothing fits on these ranks: take least, and say what would.
    least = {"activation_checkpointing.mode": "full"}
    needed = Search(changed(config, least), world_size, device, local)._evaluate(changed(config, least), world_size)
    said = (
        f"this does not fit on {world_size} ranks of {device.memory / GIB:.0f} GiB: {needed.needed / GIB:.0f} GiB are "
        "needed on each"
    )
    if fitting:
        would = f"{fitting[0].world_size} ranks with {as_overrides(fitting[0])} would"
    else:
        would = "nothing that was tried does: take larger devices, recipe qlora, or a shorter data.seq_len"
    return Fit(least, "does not fit", f"{said}; {would}")


def _timed(search: Search, nodes: int) -> Iterator[Candidate]:
    """What fits of cp × checkpointing × micro-batch, on several nodes also with shards kept within a node."""
    yield from (one for one in search.sweep() if one.estimate.fits and one.estimate.speed is not None)
    if nodes > 1:
        hybrid = {"fsdp.strategy": "hybrid_shard"}
        within = replace(search, config=changed(search.config, hybrid))
        for one in within.sweep():
            if one.estimate.fits and one.estimate.speed is not None:
                yield replace(one, values={**hybrid, **one.values})


def _fastest(candidates: list[Candidate]) -> Candidate | None:
    """The simplest of those that are about as fast as the fastest."""

    def pace(one: Candidate) -> float:
        return one.estimate.speed.low.tokens_per_second if one.estimate.speed else 0.0

    most = max(map(pace, candidates), default=0.0)

    def effort(one: Candidate) -> tuple[Any, ...]:
        section = one.estimate.config
        mode = _MODES.index(section.activation_checkpointing.mode)
        return section.mesh.cp, section.fsdp.strategy != "full_shard", mode, section.train.micro_batch_size

    return min((one for one in candidates if pace(one) >= most * (1 - _CLOSE)), key=effort, default=None)


def _mesh_whole(values: Values) -> Values:
    """Without sizes of the mesh that are "auto" in a TOML that does not name them."""
    return {key: value for key, value in values.items() if not (key.startswith("mesh.") and value == "auto")}


def _words(one: Candidate) -> str:
    device = one.estimate.device
    assert device is not None, "it was planned for a device"
    needed = f"{one.estimate.needed / GIB:.0f} of {device.memory / GIB:.0f} GiB"
    return f"planned for {one.world_size} × {device.name}: {needed}"


def _without_teacher(config: TrainingConfig, device: Device, world_size: int) -> tuple[TrainingConfig, Device]:
    """The config without the models beside the trained one, and a device without their shards in bfloat16.

    The planner plans one model.
    """
    beside = config.models()
    if not beside:
        return config, device
    elements = 0
    for path in beside.values():
        model = build_model(ModelConfig(path=path), local_files_only=True)
        elements += sum(parameter.numel() for parameter in model.parameters())
    known = TrainingConfig.model_fields
    dump = {name: value for name, value in config.model_dump(exclude_unset=True).items() if name in known}
    try:
        alone = TrainingConfig.model_validate(dump)
    except ValueError as error:
        raise UserError("recipe", f"is not planned: {error}", "leave out --device") from None
    return alone, replace(device, memory=device.memory - 2 * elements // world_size)
