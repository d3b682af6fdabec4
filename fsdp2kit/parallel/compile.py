"""Compiled layers, and what was compiled kept between runs.

torch keeps its compiler's results in one folder a process (TORCHINDUCTOR_CACHE_DIR), where a process that is killed
leaves half-written libraries; the next one that loads such a library is killed for it. So with ``compile.cache_dir`` a
process works in a folder of its own and packs that into a ZIP, which is renamed into place whole and whose checksums
are read before anything in it is used.

    cache_dir/torch-2.13.0-1f3c-local-rank-0.zip  ──unpack──→  /tmp/fsdp2kit-compiled-x7f/  ──pack──→  the same .zip

Each rank of a machine has a ZIP of its own, since compiled code names its device, and each kind of processor as well,
since C++ is compiled for the one at hand (-march=native). The ranks of the first machine write them.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fsdp2kit.config.schema import CompileConfig
from fsdp2kit.distributed import agreement
from fsdp2kit.environment import rank_from_environment, world_size_from_environment
from fsdp2kit.errors import UserError

_caches: list[CompileCache] = []  # at most one: torch's folder is one for the process as well


def apply_compile(section: CompileConfig, layers: Sequence[nn.Module]) -> None:
    """Compile every layer at its first call, with what ``cache_dir`` has of earlier runs. Collective.

    From then on `keep_compiled` keeps what was compiled. ``cache_dir`` is for the whole process: it sets
    TORCHINDUCTOR_CACHE_DIR.

    Raises:
        UserError: ``cache_dir`` cannot be made or written to.
    """
    if not section.enabled:
        return
    with agreement():
        if section.cache_dir is not None:
            _caches[:] = [CompileCache(Path(section.cache_dir))]
    for layer in layers:
        layer.compile()


def keep_compiled() -> list[str]:
    """Keep what this process has compiled so far, where `apply_compile` was given a ``cache_dir``.

    Returns:
        What went wrong with the cache since the last call, a line each: it ends no run.
    """
    return [line for cache in _caches for line in cache.keep()]


class CompileCache:
    """One rank's ZIP in a folder that runs share, and the folder of its own in which it is unpacked."""

    def __init__(self, folder: Path) -> None:
        """Unpack what earlier runs left, and send torch to it.

        Raises:
            UserError: the folder cannot be made or written to.
        """
        rank, local_rank = rank_from_environment()
        self.path = folder / f"torch-{torch.__version__}-{_processor()}-local-rank-{local_rank}.zip"
        self._writes = rank < world_size_from_environment()[1]
        self._troubles: list[str] = []
        _check_writable(folder)
        self.work = Path(tempfile.mkdtemp(prefix="fsdp2kit-compiled-"))
        atexit.register(shutil.rmtree, self.work, ignore_errors=True)
        try:
            if self.path.exists():
                _unpack(self.path, self.work)
        except Exception as error:  # whatever reading a damaged archive may raise
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(exist_ok=True)
            self._troubles.append(f"compile.cache_dir: {self.path} cannot be read ({error}): layers are compiled anew")
        self._known = _files(self.work)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.work)

    def keep(self) -> list[str]:
        """Pack what is new since the last time; returns what went wrong since then."""
        found = _files(self.work)
        if self._writes and found != self._known:
            try:
                _pack(self.work, found, self.path)
            except OSError as error:
                self._troubles.append(f"compile.cache_dir: {self.path} was not written ({error})")
            self._known = found
        troubles, self._troubles = self._troubles, []
        return troubles


def _processor() -> str:
    """Four letters that are others for other processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        told = [platform.processor()]
    return hashlib.sha256("".join([platform.machine(), *told]).encode()).hexdigest()[:4]


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UserError("compile.cache_dir", f"{folder} cannot be written to ({reason})", "choose another") from None


def _files(folder: Path) -> set[str]:
    """Names of the folder's files, but for locks and what is being written."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in names if not name.endswith((".lock", ".tmp"))}


def _unpack(path: Path, folder: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)  # reads every checksum, and leaves no file outside the folder


def _pack(folder: Path, names: set[str], path: Path) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name in sorted(names):
                archive.write(folder / name, name)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
