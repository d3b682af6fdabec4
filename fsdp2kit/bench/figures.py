"""Medians, intervals and where a figure comes from."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdp2kit.distributed import World, gather_objects
from fsdp2kit.train.rundir import describe_environment, without_secrets

RESAMPLES = 10_000


@dataclass(frozen=True)
class Cost:
    """What a step took on this rank."""

    seconds: float
    """By the wall clock."""
    cpu_seconds: float
    """Of this process, all threads: hardly touched by what else runs, and blind to waiting."""


def provenance(world: World) -> dict[str, Any]:
    """Command, versions, device, git state and the machine's load: what a figure must be quoted with. Collective."""
    environment = describe_environment(world_size=world.size, mesh={}, dtype_ledger={})
    if world.device.type == "cpu":
        devices = [f"{_cpu_name()}, {len(_usable_cores())} cores, {torch.get_num_threads()} threads a rank"]
    else:
        devices = sorted(set(gather_objects(torch.cuda.get_device_name(world.device))))
    return {
        "command": _command(world),
        "versions": environment["versions"],
        "devices": devices,
        "world_size": world.size,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "load_average": round(os.getloadavg()[0], 2),
        "git": environment["git"],
    }


def provenance_lines(source: dict[str, Any]) -> list[str]:
    """`provenance` as lines for the console."""
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items() if version)
    git = source["git"]
    commit = f"; commit {git['commit'][:10]}{' (modified)' if git['modified'] else ''}" if git else ""
    return [
        f"command: {source['command']}",
        f"device: {', '.join(source['devices'])}; {source['world_size']} ranks; load average {source['load_average']}",
        f"versions: {versions}{commit}",
    ]


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of durations, in seconds."""
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return {"median_seconds": float(middle), "p25_seconds": float(low), "p75_seconds": float(high)}


def compare(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    work: tuple[Sequence[float], Sequence[float]] | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """How many times as long as theirs ours takes: the median over pairs of their ratio, with a 95 % interval.

    The two of a pair were measured one right after the other, so whatever slowed the machine slowed both. Were each
    side's median taken first, a machine that is busy for half the time could turn the ratio round. The interval is a
    percentile bootstrap over pairs.

    Args:
        ours: durations, the i-th measured beside the i-th of ``theirs``.
        theirs: what ours is divided by.
        work: what each did in that time, ours first: the ratio is then of durations by the mean of that.
    """
    ratios = np.asarray(ours) / np.asarray(theirs)
    done, theirs_done = (np.asarray(side) for side in work or ((1.0,) * len(ratios),) * 2)
    draws = np.random.default_rng(seed).integers(0, len(ratios), size=(RESAMPLES, len(ratios)))

    def figure(chosen: Any) -> Any:
        return np.median(ratios[chosen], axis=-1) * theirs_done[chosen].mean(axis=-1) / done[chosen].mean(axis=-1)

    low, high = np.percentile(figure(draws), [2.5, 97.5])
    return {"ratio": float(figure(np.arange(len(ratios)))), "ratio_low": float(low), "ratio_high": float(high)}


def slowest_rank(seconds: Sequence[float]) -> list[float]:
    """Element-wise maximum over ranks: a collective step lasts as long as its slowest rank. Collective."""
    return [max(values) for values in zip(*gather_objects(list(seconds)), strict=True)]


def barrier(device: torch.device) -> None:
    """Line all ranks up, with the device idle: the start of a measurement."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _command(world: World) -> str:
    words = [without_secrets(word) for word in sys.argv]
    start = ["torchrun", "--nproc-per-node", str(world.local_size)] if "TORCHELASTIC_RUN_ID" in os.environ else []
    return shlex.join([*(start or ["python"]), *words])


def _usable_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def positive(text: str) -> int:
    """An argument that counts something, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
