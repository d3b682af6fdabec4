"""Training beside training: fsdp2kit and what users would take instead, or took before."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from fsdp2kit import run
from fsdp2kit.bench.fsdp1 import FSDP1Loop, check_fsdp1
from fsdp2kit.bench.handwritten import build_handwritten
from fsdp2kit.bench.harness import Side, missing_packages
from fsdp2kit.bench.sides import LoopSide, OurSide, bench_config, compare
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.checks import check_config
from fsdp2kit.errors import UserError
from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import World

_OTHERS = ("handwritten", "trl", "trl_without_ac", "trl_padded", "hf_trainer_padded", "hf_trainer_longest")
PAIRS = {
    **{name: ("fsdp2kit", name) for name in _OTHERS},
    "equal_padding": ("fsdp2kit_padded", "hf_trainer_padded"),
    "data_parallel": ("fsdp2kit", "fsdp2kit_data_parallel"),  # for --cp
}
"""Comparisons: our side, and the other."""
SAME_BATCHES = {"handwritten", "equal_padding", "data_parallel"}
"""Comparisons whose sides see the same batches: their losses must agree."""


def bench_peers(
    world: World,
    *,
    model: str,
    data: str,
    peers: tuple[str, ...] = tuple(PAIRS)[:-1],
    rounds: int = 60,
    warmup: int = 3,
    seq_len: int = 512,
    global_batch: int = 2,
    conversations: int = 3,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    cp: int = 1,
    set: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """fsdp2kit beside a hand-written loop, TRL and transformers' Trainer: the same model and conversations, in pairs.

    One pair after the other: all at once would need the memory of a large machine. Every rank calls this.

    Args:
        model: a Hugging Face directory.
        data: conversations (format chat).
        peers: comparisons to make.
        rounds: that count, a step of each side.
        warmup: steps of each side before those.
        seq_len: tokens a row.
        global_batch: rows a step, over all ranks.
        conversations: of a rank, where they are padded to the longest.
        dtype: of compute.
        cp: context-parallel ranks on fsdp2kit's side; all others are data-parallel, also fsdp2kit as data_parallel.
        set: overrides of fsdp2kit's config (section.key=value).
    """
    found, notes = _runnable(peers)
    tolerance = 1e-3 if dtype == "float32" else 2e-2
    pairs = {name: (*PAIRS[name], tolerance if name in SAME_BATCHES else None) for name in found}
    if global_batch % world.size:
        what = f"{global_batch} is not a multiple of {world.size} ranks, which data-parallel loops need"
        raise UserError("--global-batch", what, f"use a multiple of {world.size}")

    def build(name: str) -> Side:
        # Trainer and TRL are given documents.
        is_packed = name in ("fsdp2kit", "fsdp2kit_data_parallel", "handwritten")
        values = {
            "model": {"path": model},
            "mesh": {"cp": 1 if name == "fsdp2kit_data_parallel" else cp},
            "fsdp": {"param_dtype": dtype},
            "data": {"path": data, "seq_len": seq_len, "pack": is_packed},
            "train": {"steps": warmup + rounds, "global_batch_size": global_batch},
        }
        return _build_side(name, bench_config(values, overrides=set), conversations=conversations, world=world)

    for result in compare(pairs, build, rounds=rounds, warmup=warmup, world=world):
        yield {**result, "notes": [*notes, *result["notes"]]}


def _build_side(name: str, config: TrainingConfig, *, conversations: int, world: World) -> Side:
    with distributed.agreement():
        check_config(config, world_size=world.size, local_world_size=world.local_size)
    if config.data.streaming:
        raise UserError("--set", "data.streaming cannot be read by several loops", "leave it out")
    if name == "handwritten" and config.trains_adapter:
        raise UserError("--peers", "handwritten trains no adapters", "name trl, hf_trainer_padded, …")
    if name.startswith("fsdp2kit"):
        return OurSide(config, world=world)
    if name == "handwritten":
        return LoopSide(partial(build_handwritten, config, device=world.device), config, world=world)
    from fsdp2kit.bench.hf_trainer import HFSide  # which imports accelerate

    return HFSide(name, config, conversations=conversations, world=world)


def _runnable(peers: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The comparisons whose packages are installed, and notes on the others. Unknown names, or none left: refused."""
    if unknown := [name for name in peers if name not in PAIRS]:
        raise UserError("--peers", f"{unknown[0]!r} is not known", f"name some of {', '.join(PAIRS)}")
    needs = {"trl": ("accelerate", "trl"), "hf": ("accelerate",)}
    missing = {name: missing_packages(*needs.get(PAIRS[name][1].partition("_")[0], ())) for name in peers}
    found = [name for name in peers if not missing[name]]
    if not found:
        packages = sorted({package for each in missing.values() for package in each})
        what = f"none of these can run without {', '.join(packages)}"
        raise UserError("--peers", what, f"pip install {' '.join(packages)}")
    return found, [f"left out: {name} needs {', '.join(each)}" for name, each in missing.items() if each]


def bench_fsdp1(
    world: World, toml: str, overrides: tuple[str, ...] = (), *, rounds: int = 60, warmup: int = 3
) -> Iterator[dict[str, Any]]:
    """A TOML's training beside FSDP1's, on the same batches; nothing is evaluated, saved or exported. Collective.

    Args:
        toml: of any recipe.
        overrides: section.key=value, as for a run.
        rounds: that count, a step of each side.
        warmup: steps of each side before those.
    """
    steps = {"steps": warmup + rounds, "epochs": None, "log_every": 1}
    with distributed.agreement():
        _, config = run.load(toml, overrides)
        config = config.model_copy(update={"train": config.train.model_copy(update=steps)})
        sizes = check_config(config, world_size=world.size, local_world_size=world.local_size)
        check_fsdp1(config, sizes=sizes)
    distributed.start(deterministic=config.run.deterministic)

    def build(name: str) -> Side:
        if name == "fsdp2kit":
            return OurSide(config, world=world)
        return LoopSide(partial(FSDP1Loop, config, world=world), config, world=world)

    is_exact = {config.fsdp.param_dtype, config.fsdp.storage_dtype, config.fsdp.reduce_dtype} == {"float32"}
    # Both compute the same loss; in 16 bits the heads round differently.
    pairs = {"fsdp1": ("fsdp2kit", "fsdp1", 1e-5 if is_exact else 2e-2)}
    for result in compare(pairs, build, rounds=rounds, warmup=warmup, world=world):
        yield {**result, "config": config.model_dump(mode="json")}
