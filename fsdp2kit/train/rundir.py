"""The run directory's record of what was run: `config.toml` and `environment.json`, without secrets."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fsdp2kit
from fsdp2kit.errors import UserError

_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|API_?KEY|ACCESS_KEY|SECRET|SECRET_KEY|PASSWORD|PASSWD)$", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")
_SHORTEST_SECRET = 8  # shorter values ("true", "0") would be cut out of ordinary text
_HIDDEN = "***"


def prepare_run_dir(path: Path, *, config_text: str, environment: dict[str, Any], is_main: bool) -> None:
    """Create the run directory and write ``config.toml`` and ``environment.json`` into it, on the main rank.

    A ``config.toml`` that differs (of an earlier start in this directory) is kept as ``config.<n>.toml``, numbered
    from 1, the oldest first. Only one rank works here, so a caller with several wraps this in `agreement()`.

    Raises:
        UserError: the directory cannot be made or written to, or is a file.
    """
    if not is_main:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write_config(path, without_secrets(config_text))
        _replace(path / "environment.json", json.dumps(environment, indent=2, default=str) + "\n")
    except (FileExistsError, NotADirectoryError):
        raise UserError("run.dir", f"{path} is a file, or lies under one", "choose another run.dir") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError("run.dir", f"{path} cannot be written to ({reason})", "choose another run.dir") from None


def describe_environment(*, world_size: int, mesh: dict[str, int], dtype_ledger: dict[str, Any]) -> dict[str, Any]:
    """What a reader needs to repeat the run, ready for JSON.

    Args:
        world_size: number of processes.
        mesh: size of each mesh dimension by name.
        dtype_ledger: dtype of storage, compute, reduction, … by name; what is not JSON is written as its text.
    """
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "command": shlex.join(map(without_secrets, sys.orig_argv)),
        "versions": {
            "fsdp2kit": fsdp2kit.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "transformers", "datasets", "safetensors")},
            "cuda": torch.version.cuda,
        },
        "devices": devices or [platform.processor() or platform.machine()],
        "world_size": world_size,
        "mesh": mesh,
        "dtype_ledger": dtype_ledger,
        "git": _git_state(),
    }


def without_secrets(text: str) -> str:
    """Text with ``***`` for the user part of URLs and for what variables like ``HF_TOKEN`` hold in this process."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, _HIDDEN)
    return _URL_USER.sub(f"{_HIDDEN}@", text)


def free_path(folder: Path, stem: str, suffix: str, *, first: int) -> Path:
    """``folder/stem.<n>suffix`` with the lowest n ≥ first that no file has."""
    number = first
    while (path := folder / f"{stem}.{number}{suffix}").exists():
        number += 1
    return path


def _write_config(folder: Path, text: str) -> None:
    path = folder / "config.toml"
    if path.exists():
        if path.read_bytes() == text.encode():
            return
        path.rename(free_path(folder, "config", ".toml", first=1))
    _replace(path, text)


def _replace(path: Path, text: str) -> None:
    # Written beside and renamed: a process killed amid this leaves the old file or the new one, never half of one.
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the working directory and whether files differ from it; None outside a repository or without git."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
