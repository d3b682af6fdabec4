"""Writing a checkpoint, once its tensors stand still: files, manifest, publication, retention. Collective.

It may run beside training, in a thread: then every collective is on a process group of its own.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fsdp2kit.checkpoint.files import sync_tree
from fsdp2kit.checkpoint.layout import CheckpointLayout
from fsdp2kit.checkpoint.manifest import Manifest, check_sizes, record_files, write_manifest
from fsdp2kit.checkpoint.places import is_remote, put
from fsdp2kit.checkpoint.safe_reader import first_failure
from fsdp2kit.distributed import agreement, gather_objects, is_lost_rank
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.progress import Progress
from fsdp2kit.torch_compat import FsspecWriter

Export = Callable[[Path, dist.ProcessGroup | None], object]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a save writes, as it was at the moment of the save."""

    tensors: dict[str, dict[str, Tensor]]
    """Nested as DCP flattens them to ``model.…`` and ``optimizer.…``."""
    progress: Progress
    tied: dict[str, str]
    """Each further name of a tied parameter → the name it is stored under."""
    export: Export | None = None
    """Called on every rank with the published checkpoint and the process group for its collectives."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which complete checkpoints stay, beside the best."""

    keep: int
    every: int = 0


class CheckpointWriter:
    """Writes one checkpoint after another into a layout. Every method is a collective over `group`.

    Args:
        identity: what may not change when the run is resumed, by name.
        write_assets: writes config, tokenizer, … of an export into a directory; called on rank 0 alone.
        export_dtype: default dtype of an export.
        config_file: the run's settings, kept with each checkpoint.
        environment: versions, mesh, …, for the record.
        group: of all ranks. None: the default group.
    """

    def __init__(
        self,
        layout: CheckpointLayout,
        *,
        retention: Retention,
        identity: dict[str, str],
        write_assets: Callable[[Path], None],
        export_dtype: str | None,
        config_file: Path,
        environment: dict[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.layout = layout
        self.identity = identity
        # The last step of ours that this run has behind it: complete checkpoints after it are of another history.
        self.reached = 0
        self._retention = retention
        self._write_assets = write_assets
        self._export_dtype = export_dtype
        self._config_file = config_file
        self._environment = environment
        self._group = group
        self._sweeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fsdp2kit-sweep")
        self._sweep: Future[None] | None = None

    def save(self, contents: Contents) -> Path:
        """Write and publish a checkpoint, throw away what is not kept, and export it if that was asked for.

        Raises:
            RunFailure: it could not be written; on every rank, with the cause. Complete checkpoints are untouched.
        """
        with self._all_or_nothing(contents.progress.step):
            self.write(contents.tensors, contents.progress.step)
            path = self.publish(contents)
        if contents.export is not None:
            contents.export(path, self._group)
        return path

    def write(self, tensors: dict[str, dict[str, Tensor]], step: int) -> None:
        """Write tensors, synced, to the step's temporary directory; every rank its own file."""
        directory = self.layout.temporary(step)
        with agreement(self._group):
            if _rank() == 0:
                self.layout.begin(step, after=self.reached)
        with warnings.catch_warnings():
            # dcp.save says so each time it works in one process, which a world of one asks for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                tensors,
                storage_writer=_storage_writer(directory),
                process_group=self._group,
                no_dist=not dist.is_initialized(),
            )

    def publish(self, contents: Contents) -> Path:
        """Complete the temporary directory with assets and manifest, and move it into place."""
        step = contents.progress.step
        directory = self.layout.temporary(step)
        with agreement(self._group):
            own = record_files(directory, directory.glob(f"__{_rank()}_*.distcp"))
        records = {name: one for of_rank in gather_objects(own, group=self._group) for name, one in of_rank.items()}
        with agreement(self._group):
            if _rank() == 0:
                if self._config_file.is_file():
                    (directory / self._config_file.name).write_bytes(self._config_file.read_bytes())
                self._put_assets(directory / "hf")
                others = [file for file in directory.rglob("*") if file.is_file() and file.suffix != ".distcp"]
                manifest = Manifest(
                    step=step,
                    progress=asdict(contents.progress),
                    identity=self.identity,
                    tied=contents.tied,
                    export_dtype=self._export_dtype,
                    files={**records, **record_files(directory, others)},
                    environment=self._environment,
                )
                _check_shared(directory, manifest)
                sync_tree(directory)
                write_manifest(directory, manifest)
                self.layout.publish(step, after=self.reached)
                self.layout.retain(self._retention.keep, every=self._retention.every, best=contents.progress.best_step)
                self.start_sweeping()
        self.reached = step
        return self.layout.path(step)

    def _put_assets(self, directory: Path) -> None:
        directory.mkdir()
        if not is_remote(directory):
            self._write_assets(directory)
            return
        with tempfile.TemporaryDirectory() as folder:  # transformers writes to the disk only
            self._write_assets(Path(folder))
            put(Path(folder), directory)

    def start_sweeping(self) -> None:
        """Delete what was thrown away, beside whatever comes next. On one rank only; no collective."""
        self._sweep = self._sweeper.submit(self.layout.sweep)

    def finish_sweeping(self) -> None:
        """Wait until what was thrown away is deleted."""
        if self._sweep is not None:
            self._sweep.result()

    @contextlib.contextmanager
    def _all_or_nothing(self, step: int) -> Iterator[None]:
        """Turn a failure to save into a `RunFailure` on every rank, and free what the attempt took of the disk."""
        try:
            yield
        except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception
            # Every way to fail is agreed on, so no rank is still writing.
            space = " (its disk is full)" if _is_full(self.layout.root) else ""
            if _rank() == 0:
                self.layout.abandon(step)
            message = f"{self.layout.path(step)}: the checkpoint was not saved: {first_failure(error)}{space}"
            raise RunFailure(f"{message}; {self._what_to_do(error)}") from error

    def _what_to_do(self, error: BaseException) -> str:
        mend = f"free space there, or mend {self.layout.root}, and start the run again"
        if is_lost_rank(error):
            mend = "see why a rank ended or did not answer (run.timeout_minutes), and start the run again"
        try:
            complete = self.layout.complete()
        except Exception:  # what hindered the save may hinder this, too
            complete = []
        return f"{mend}: it resumes from {complete[-1][1].name}" if complete else mend


def _storage_writer(directory: Path) -> dcp.FileSystemWriter:
    if is_remote(directory):
        return FsspecWriter(str(directory), sync_files=False)
    return dcp.FileSystemWriter(directory)


def _check_shared(directory: Path, manifest: Manifest) -> None:
    """Check that rank 0 sees what every rank wrote, before it says so in a manifest."""
    try:
        check_sizes(directory, manifest)
    except UserError as error:
        reason = "checkpoints must be on a filesystem that all nodes share"
        raise RunFailure(f"{error.where}: {error.what}: {reason}") from error


def _is_full(directory: Path) -> bool:
    """Whether that disk has no room left, of which torch's writers say nothing."""
    if is_remote(directory):
        return False
    try:
        return shutil.disk_usage(directory).free < 2**20
    except OSError:
        return False


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
