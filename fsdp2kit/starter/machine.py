"""A first TOML on its machine: what to change so that it fits into the devices, and how to launch it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fsdp2kit.config.schema import ModelConfig, TrainingConfig
from fsdp2kit.console import counted
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.planner.devices import GIB, Device
from fsdp2kit.planner.report import as_overrides
from fsdp2kit.planner.search import Candidate, Search, Values

_PER_NODE = 8
_SHOWN = {"activation_checkpointing.mode": "none"}
"""What the TOML says even if the plan leaves it as it is."""
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
        return f"fsdp2kit run {name}"
    if nodes == 1:
        return f"fsdp2kit run {name} --nproc {local}"
    place = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {nodes} --nproc-per-node {local} {place} -m fsdp2kit.run {name}"


def bfloat16_speedup() -> float:
    """How many times faster this CPU multiplies matrices in bfloat16 than in float32; measured in a tenth of a second.

    Which instructions are used depends on the CPU and on torch's build.
    """
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.ones(256, 1024, dtype=dtype)
        right = torch.ones(1024, 1024, dtype=dtype)
        rounds = []
        for _ in range(5):
            started = time.perf_counter()
            _ = left @ right
            rounds.append(time.perf_counter() - started)
        seconds[dtype] = min(rounds)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def advise_on_cpu(speedup: float) -> str:
    """The TOML's line about training on this machine's CPU."""
    said = f"this machine's CPU multiplies matrices {speedup:.2g} times as fast in bfloat16 as in float32"
    if speedup < 1:
        return f'On a CPU add fsdp.param_dtype = "float32": {said}.'
    return f'On a CPU fsdp.param_dtype may stay "bfloat16": {said}.'


def find_fit(config: TrainingConfig, device: Device, *, world_size: int) -> Fit:
    """The cheapest change that fits, as ``plan --fit`` finds it, and a larger micro-batch if that is faster.

    Raises:
        UserError: the model cannot be planned.
    """
    nodes, local = nodes_of(world_size)
    config, device = _without_teacher(config, device, world_size)
    search = Search(config, world_size, device, local)
    fitting = search.fit()
    own = [one for one in fitting if one.world_size == world_size and one.estimate.fits]
    if own:
        best = _fastest(own)
        best = _fastest([best, *_faster(search, best, nodes)])
        return Fit({**_SHOWN, **_named(best.values)}, _words(best))
    # Nothing fits on these ranks: take least, and say what would.
    least = {"activation_checkpointing.mode": "full"}
    one = search.attempt(least)
    what = f"this does not fit on {counted(world_size, 'rank')} of {device.memory / GIB:.1f} GiB"
    said = what if one is None else f"{what}: {one.estimate.needed / GIB:.1f} GiB are needed"
    if fitting:
        would = f"{fitting[0].world_size} ranks with {as_overrides(fitting[0])} would"
    else:
        would = "nothing that was tried does: take larger devices, recipe qlora, or a shorter data.seq_len"
    return Fit(least, f"too large for {counted(world_size, 'rank')} of {device.name}", f"{said}; {would}")


def _faster(search: Search, best: Candidate, nodes: int) -> Iterator[Candidate]:
    """What else fits: larger micro-batches, and on several nodes shards that are kept within a node.

    Only a few are tried: the plan of a model with adapters takes seconds.
    """
    if best.estimate.speed is None:
        return
    tried: list[Values] = [{"fsdp.strategy": "hybrid_shard"}] if nodes > 1 else []
    for values in (*tried, {"train.micro_batch_size": 2}, {"train.micro_batch_size": 4}):
        found = search.attempt({**best.values, **values})
        if found is not None and found.estimate.fits:
            yield found


def _fastest(candidates: list[Candidate]) -> Candidate:
    """The first of those that are about as fast as the fastest; the cheapest change stands first."""

    def pace(one: Candidate) -> float:
        return one.estimate.speed.low.tokens_per_second if one.estimate.speed else 0.0

    most = max(map(pace, candidates))
    return next(one for one in candidates if pace(one) >= most * (1 - _CLOSE))


def _named(values: Values) -> Values:
    """Without sizes of the mesh that are "auto": the TOML does not name them."""
    return {key: value for key, value in values.items() if not (key.startswith("mesh.") and value == "auto")}


def _words(one: Candidate) -> str:
    device = one.estimate.device
    assert device is not None, "it was planned for a device"
    needed = f"{one.estimate.needed / GIB:.0f} of {device.memory / GIB:.0f} GiB"
    host = sum(one.estimate.host.values()) if one.estimate.config.fsdp.offload != "none" else 0
    beside = f" and {host / GIB:.0f} GiB of the host's memory for each rank" if host else ""
    return f"planned for {one.world_size} × {device.name}: {needed}{beside}"


def _without_teacher(config: TrainingConfig, device: Device, world_size: int) -> tuple[TrainingConfig, Device]:
    """The config without the models beside the trained one, and a device without their shards in bfloat16.

    The planner plans one model.
    """
    beside = config.models()
    if not beside:
        return config, device
    elements = 0
    for path in beside.values():
        try:
            model = build_model(ModelConfig(path=path), local_files_only=True)
        except UserError:
            return config, device  # not on this machine: its share of the memory is not known
        elements += sum(parameter.numel() for parameter in model.parameters())
    known = TrainingConfig.model_fields
    dump = {name: value for name, value in config.model_dump(exclude_unset=True).items() if name in known}
    try:
        alone = TrainingConfig.model_validate(dump)
    except ValueError as error:
        raise UserError("recipe", f"is not planned: {error}", "leave out --device") from None
    return alone, replace(device, memory=device.memory - 2 * elements // world_size)
