"""Ranks that play hosts: each is alone on a machine of its own, by what torchrun would set in its environment."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.workers import start_command


def start_hosts(logs: Path, commands: Sequence[Sequence[str]], **environment: str) -> tuple[list[Any], list[Path]]:
    """Start one rank on each host: its module and arguments. The processes, and the paths of their output."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(commands))}
    job |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **environment}
    logs.mkdir(parents=True, exist_ok=True)
    paths = [logs / f"host-{number}.log" for number in range(len(commands))]
    ranks = [
        start_command(*command, stdout=path, stderr=path, **job, RANK=str(number), GROUP_RANK=str(number))
        for number, (command, path) in enumerate(zip(commands, paths, strict=True))
    ]
    return ranks, paths
