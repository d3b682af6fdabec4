"""Ranks that play hosts: each is alone on a machine of its own, by what torchrun would set in its environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.workers import start_job


def start_hosts(logs: Path, commands: Sequence[Sequence[str]], **environment: str) -> tuple[list[Any], list[Path]]:
    """Start one rank on each host: its module and arguments. The processes, and the paths of their output."""
    logs.mkdir(parents=True, exist_ok=True)
    paths = [logs / f"host-{number}.log" for number in range(len(commands))]
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **environment}
    return start_job(paths, commands, [{**alone, "GROUP_RANK": str(number)} for number in range(len(paths))]), paths
