"""Saving, finding and restoring a run's checkpoints; every public method is a collective over all ranks.

A save has three parts, kept apart: `stage` (which tensors), `write` (into a temporary directory, all ranks), and
`publish` (assets, manifest, rename, retention; rank 0). A crash at any point leaves the complete checkpoints as they
were, and never a new one that looks complete and is not.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp2kit.checkpoint.contents import model_tensors, optimizer_tensors
from fsdp2kit.checkpoint.export_record import check_replaceable
from fsdp2kit.checkpoint.files import sync_tree
from fsdp2kit.checkpoint.layout import CheckpointLayout
from fsdp2kit.checkpoint.loading import check_together, load_all
from fsdp2kit.checkpoint.manifest import (
    Manifest,
    check_sizes,
    read_manifest,
    record_files,
    write_manifest,
)
from fsdp2kit.checkpoint.safe_reader import first_failure
from fsdp2kit.config.schema import CheckpointConfig
from fsdp2kit.distributed import agreement, gather_objects
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.model.build import tied_names
from fsdp2kit.progress import Progress

logger = logging.getLogger(__name__)


def build_checkpoint_manager(
    section: CheckpointConfig,
    *,
    run_dir: Path,
    identity: dict[str, str],
    write_assets: Callable[[Path], None],
    export_dtype: str | None = None,
) -> CheckpointManager:
    """The manager of ``run_dir/checkpoints``. Collective.

    Args:
        identity: what may not change when the run is resumed, by name, e.g. ``{"data.seq_len": "512"}``.
        write_assets: writes config, tokenizer, chat template and generation config of an export into a directory.
            Called on rank 0 alone, so it must not contain a collective.
        export_dtype: default dtype of an export where the section names none, e.g. the source model's.

    Raises:
        UserError: a rank cannot write there, or ``run_dir/hf`` holds what the run's export must not replace.
    """
    root = run_dir / "checkpoints"
    with agreement():
        _check_writable(root)
        if section.export_hf != "never":
            check_replaceable(run_dir / "hf")
    return CheckpointManager(
        layout=CheckpointLayout(root),
        keep=section.keep,
        identity=identity,
        write_assets=write_assets,
        export_dtype=section.export_dtype or export_dtype,
    )


class CheckpointManager:
    """Saves, resolves and restores; see `build_checkpoint_manager`."""

    def __init__(
        self,
        *,
        layout: CheckpointLayout,
        keep: int,
        identity: dict[str, str],
        write_assets: Callable[[Path], None],
        export_dtype: str | None,
    ) -> None:
        self._layout = layout
        self._keep = keep
        self._identity = identity
        self._write_assets = write_assets
        self._export_dtype = export_dtype
        # The last step of ours that this run has behind it: complete checkpoints after it are of another history.
        self._reached = 0

    def save(self, model: nn.Module, optimizer: Optimizer, progress: Progress) -> Path:
        """Write and publish the checkpoint of ``progress.step``, and delete all but the newest `keep`. Collective.

        Raises:
            RunFailure: it could not be written; on every rank, with the cause. Complete checkpoints are untouched.
        """
        with self._all_or_nothing(progress.step):
            tensors = self.stage(model, optimizer)
            self.write(tensors, progress.step)
            return self.publish(progress, tied=tied_names(model))

    def stage(self, model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
        """The tensors to save, nested as DCP flattens them to ``model.…`` and ``optimizer.…``. Collective.

        They share the live storage, so they must be written before the next optimizer step.
        """
        with agreement():
            tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
        return tensors

    def write(self, tensors: dict[str, dict[str, Tensor]], step: int) -> None:
        """Write tensors, synced, to the step's temporary directory; every rank its own file. Collective."""
        directory = self._layout.temporary(step)
        with agreement():
            if _rank() == 0:
                self._layout.clear_leftovers()
                directory.mkdir(parents=True)
        with warnings.catch_warnings():
            # dcp.save says so each time it works in one process, which a world of one asks for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(directory), no_dist=not dist.is_initialized())

    def publish(self, progress: Progress, *, tied: dict[str, str]) -> Path:
        """Complete the temporary directory with assets and manifest, and move it into place. Collective."""
        step = progress.step
        directory, path = self._layout.temporary(step), self._layout.path(step)
        with agreement():
            own = record_files(directory, directory.glob(f"__{_rank()}_*.distcp"))
        records = {name: record for of_rank in gather_objects(own) for name, record in of_rank.items()}
        with agreement():
            if _rank() == 0:
                config = self._layout.root.parent / "config.toml"
                if config.is_file():
                    shutil.copyfile(config, directory / config.name)
                (directory / "hf").mkdir()
                self._write_assets(directory / "hf")
                others = [file for file in directory.rglob("*") if file.is_file() and file.suffix != ".distcp"]
                manifest = Manifest(
                    step=step,
                    progress=asdict(progress),
                    identity=self._identity,
                    tied=tied,
                    export_dtype=self._export_dtype,
                    files={**records, **record_files(directory, others)},
                )
                _check_shared(directory, manifest)
                sync_tree(directory)
                write_manifest(directory, manifest)
                self._layout.set_aside(after=self._reached)
                self._layout.publish(step)
                self._layout.retain(self._keep, best=progress.best_step)
        self._reached = step
        return path

    def resolve(self, resume: str) -> Path | None:
        """The checkpoint that `run.resume` means, every byte of it checked; the same on all ranks. Collective.

        Args:
            resume: "auto": the newest checkpoint that is whole, None if there was never one; "never": None; or a path.

        Raises:
            UserError: the given checkpoint, or with "auto" every one there is, is unusable; the error names the file.
        """
        if resume == "never":
            return None
        if resume == "auto":
            return self._newest_usable()
        check_together(Path(resume))
        return Path(resume)

    def restore(self, path: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
        """Load model and optimizer in place, at any world size, and return the progress. Collective.

        Hyper-parameters (learning rate, weight decay, …) stay those of `optimizer`.

        Raises:
            UserError: the checkpoint is unusable, of another run, or of another model; the error names the difference.
            RunFailure: a file cannot be read.
        """
        with agreement():
            manifest = read_manifest(path)
            check_same_run(path, saved=manifest.identity, current=self._identity)
            progress = _read_progress(path, manifest)
        staged = self.stage(model, optimizer)
        load_all(path, {f"{part}.{name}": tensor for part, named in staged.items() for name, tensor in named.items()})
        if path.resolve().parent == self._layout.root.resolve():
            self._reached = manifest.step
        return progress

    def _newest_usable(self) -> Path | None:
        found: list[Path] = []
        with agreement():
            if _rank() == 0:
                self._layout.recover()
                found = [path for _, path in reversed(self._layout.published())]
        damage: UserError | None = None
        for path in gather_objects(found)[0]:
            try:
                check_together(path)
                return path
            except UserError as error:
                if _rank() == 0:
                    logger.warning("%s: skipped: %s: %s", path.name, error.where, error.what)
                damage = damage or error
        if damage is not None:  # starting over in silence would give up what was trained
            todo = "restore that file, or remove its directory, or start over in another run.dir"
            raise UserError(damage.where, f"{damage.what}, and no older checkpoint is whole", todo)
        return None

    @contextlib.contextmanager
    def _all_or_nothing(self, step: int) -> Iterator[None]:
        """Turn a failure to save into a `RunFailure` on every rank, and free what the attempt took of the disk."""
        try:
            yield
        except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception
            # Every way to fail is agreed on, so no rank is still writing.
            if _rank() == 0:
                shutil.rmtree(self._layout.temporary(step), ignore_errors=True)
            message = f"{self._layout.path(step)}: the checkpoint was not saved: {first_failure(error)}"
            raise RunFailure(message) from error


def check_same_run(path: Path, *, saved: dict[str, str], current: dict[str, str]) -> None:
    """Check that a checkpoint belongs to the run that resumes from it.

    Raises:
        UserError: naming the first field that differs, and both values.
    """
    for field in [*current, *(field for field in saved if field not in current)]:
        before, now = saved.get(field), current.get(field)
        if before != now:
            raise UserError(
                str(path),
                f"was made with {field} = {before!r}, and this run has {field} = {now!r}",
                f"undo that, or choose another run.dir, or start from the weights alone with model.weights = '{path}'",
            )


def _read_progress(path: Path, manifest: Manifest) -> Progress:
    known = {field.name for field in fields(Progress)}
    if differing := sorted(known ^ manifest.progress.keys()):
        what = f"records another kind of progress: {', '.join(differing)} is not in both"
        raise UserError(str(path), what, "use the fsdp2kit that it was written by")
    return Progress(**manifest.progress)


def _check_shared(directory: Path, manifest: Manifest) -> None:
    """Check that rank 0 sees what every rank wrote, before it says so in a manifest."""
    try:
        check_sizes(directory, manifest)
    except UserError as error:
        reason = "run.dir must be on a filesystem that all nodes share"
        raise RunFailure(f"{error.where}: {error.what}: {reason}") from error


def _check_writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{_rank()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, "error")
        what = f"{root} cannot be written ({error.strerror or error}, {reason})"
        raise UserError("run.dir", what, "choose a directory that every rank can write") from error


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
