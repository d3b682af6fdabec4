"""Tracebacks and NCCL's records of collectives go to the run directory: ``errors/rank-N.txt``, ``nccl-rank-N``."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path

from fsdp2kit.console import visible
from fsdp2kit.files.local import open_own
from fsdp2kit.files.redaction import without_secrets
from fsdp2kit.job import status

_folder: Path | None = None

# torch reads it when NCCL's watchdog writes its flight recorder, after a collective that timed out.
_DUMPS = "TORCH_FR_DUMP_TEMP_FILE"
_is_users = _DUMPS in os.environ


def keep_in(folder: Path, *, nccl: bool = False) -> None:
    """From now on, tracebacks go to ``folder``.

    Args:
        nccl: so do the records of NCCL's collectives, unless the user's environment names another place.
    """
    global _folder
    _folder = folder
    if nccl and not _is_users:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[_DUMPS] = str(folder.resolve() / "nccl-rank-")


def keep_nowhere() -> None:
    """Another run begins in this process, whose directory is not open yet."""
    global _folder
    _folder = None


def write_traceback(text: str) -> bool:
    """Append a text, without secrets and control characters, to this rank's file in ``errors/``.

    Returns:
        False without a run directory, or if the disk refuses.
    """
    if _folder is None:
        return False
    now, rank = datetime.now(timezone.utc).isoformat(timespec="seconds"), int(os.environ.get("RANK", "0"))
    try:
        _folder.mkdir(parents=True, exist_ok=True)
        handle = open_own(_folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_APPEND)
        with os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace") as file:
            position = f"rank {rank} on {platform.node()}, {status.position()}"
            file.write(f"{now} {position}\n{visible(without_secrets(text))}\n")
    except OSError:
        return False
    return True


def path_of(rank: int) -> str:
    """Where a rank's tracebacks go, for messages."""
    return str(Path("errors" if _folder is None else _folder) / f"rank-{rank}.txt")
