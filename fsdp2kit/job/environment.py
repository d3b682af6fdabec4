"""What is needed to repeat a run: command, versions, devices, mesh, git commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fsdp2kit
from fsdp2kit.files.redaction import without_secrets


def describe_environment(*, world_size: int, mesh: Mapping[str, int]) -> dict[str, Any]:
    """What is needed to repeat the run, as plain values for JSON.

    Args:
        world_size: number of processes.
        mesh: size of each mesh dimension by name.
    """
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    # Before quotes are put around it, each argument; then options with their values, which are two arguments.
    arguments = [without_secrets(argument) for argument in sys.orig_argv]
    return {
        "command": without_secrets(shlex.join(arguments)),
        "versions": {
            "fsdp2kit": fsdp2kit.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers", "datasets", "safetensors")},
            "cuda": torch.version.cuda,
        },
        "devices": devices or [_cpu_name()],
        "world_size": world_size,
        "mesh": dict(mesh),
        "git": _git_state(),
    }


def _cpu_name() -> str:
    """The processor and how many of its cores this process may use, e.g. ``AMD EPYC, 2 cores``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.processor() or platform.machine()}, {cores} cores"


def _git_state() -> dict[str, Any] | None:
    """The working directory's commit and whether files differ from it; None without a repository or without git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None
