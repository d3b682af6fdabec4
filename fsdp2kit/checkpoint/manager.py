"""Saving, finding, restoring and exporting a run's checkpoints; every public method is a collective over all ranks.

A save has three parts, kept apart: `stage` (which tensors), `write` (to a directory of its own, all ranks) and
`complete` (assets, manifest, publication, retention; rank 0), the latter two here or in a thread. A crash at any point
leaves the complete checkpoints as they were, and never a new one that looks complete and is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from fsdp2kit.checkpoint.export_record import check_replaceable
from fsdp2kit.checkpoint.hf import ensure_export
from fsdp2kit.checkpoint.identity import check_same_run
from fsdp2kit.checkpoint.manifest import Manifest, check_sizes, read_manifest, record_files, write_manifest
from fsdp2kit.checkpoint.reader import first_failure
from fsdp2kit.checkpoint.space import is_full, is_storage_failure
from fsdp2kit.checkpoint.state import (
    check_together,
    load_all,
    model_tensors,
    optimizer_tensors,
    persistent_buffers,
    save_tensors,
)
from fsdp2kit.checkpoint.store import check_writable, fill, in_use, is_remote, open_store, to_path
from fsdp2kit.config.schema import CheckpointConfig
from fsdp2kit.console import size_text
from fsdp2kit.distributed import agreement, background_group, gather_objects, is_lost_rank, rank, work_on_this_device
from fsdp2kit.errors import RunFailure, StorageFailure, UserError
from fsdp2kit.model.build import tied_names
from fsdp2kit.progress import Progress
from fsdp2kit.torch_compat import STAGER_WORKS_ONCE

logger = logging.getLogger(__name__)

Tensors = dict[str, dict[str, Tensor]]

_LATER = {"nonfinite_steps", "best_by"}  # of `Progress`: not in checkpoints of earlier versions


class CheckpointManager:
    """Saves, resolves, restores and exports the checkpoints of ``checkpoint.dir``, by default ``run_dir/checkpoints``.

    Made on all ranks together. A context manager that `finish`es.

    Args:
        identity: what may not change when the run is resumed, by name, e.g. ``{"data.seq_len": "512"}``.
        write_assets: writes config, tokenizer, chat template and generation config of an export into a directory.
            Called on rank 0 alone, so it must not contain a collective.
        export_dtype: default dtype of an export where the section names none, e.g. the source model's.
        kept_in_float32: as in the manifest.
        read: directories that the run reads models from, which an export must not replace.
        environment: versions, mesh, …, kept in the manifest so that a resumed run can tell what changed.
        tell: called with a line for each checkpoint and each export that was written, on every rank.

    Raises:
        UserError: a rank cannot write there, or where the export goes, or that holds what it must not replace.
    """

    def __init__(
        self,
        section: CheckpointConfig,
        *,
        run_dir: str | Path,
        identity: dict[str, str],
        write_assets: Callable[[Path], None],
        export_dtype: str | None = None,
        kept_in_float32: dict[str, list[str]] | None = None,
        read: Iterable[Path | None] = (),
        environment: dict[str, Any] | None = None,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        run_dir = Path(run_dir)
        with agreement():
            root = to_path(section.dir) if section.dir else run_dir / "checkpoints"
            check_writable(root, where="checkpoint.dir" if section.dir else "run.dir")
            self.out = to_path(section.export_dir) if section.export_dir else run_dir / "hf"
            if section.export_hf != "never":
                if not is_remote(self.out):  # written beside it; a store has answered, and is left as it is until then
                    check_writable(self.out.parent, where="checkpoint.export_dir" if section.export_dir else "run.dir")
                check_replaceable(self.out, read=read)
        self.store = open_store(root)
        self.section, self.identity, self.environment = section, identity, environment or {}
        self.write_assets, self._tell = write_assets, tell
        self.saved: Path | None = None
        """The checkpoint that was written last."""
        self.exported: Path | None = None
        """The checkpoint that `out` was made from."""
        self.export_dtype = section.export_dtype or export_dtype
        self._kept = kept_in_float32 or {}
        self._settings = run_dir / "config.toml"  # kept with each checkpoint
        # The last step of ours that this run has behind it: complete checkpoints after it are of another history.
        self._reached = 0
        self._sweeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fsdp2kit-sweep")
        self._sweep: Future[None] | None = None
        # A background save copies tensors to host memory, in the stager's thread, and writes the copy in another.
        # Host memory of the size of the shards is kept from one save to the next.
        self._group: dist.ProcessGroup | None = None  # of its collectives, and of nothing else
        self._stager: DefaultStager | None = None
        self._staged: Future[Tensors] | None = None
        self._saved: Future[object] | None = None
        if section.async_save:
            self._group = background_group()
            self._stager = _build_stager()
            self._saver = ThreadPoolExecutor(1, "fsdp2kit-save", initializer=work_on_this_device())

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish()
        except Exception as failure:
            if kind is None:
                raise
            logger.warning("%s", failure)  # what ended the run is the one to be raised

    def save(
        self, model: nn.Module, optimizer: Optimizer, progress: Progress, *, exported: Path | None = None
    ) -> Path:
        """Write and publish the checkpoint of ``progress.step``, and throw away those that are not kept. Collective.

        With ``checkpoint.async_save`` it returns before that: the next `save`, or `finish`, waits for it, and
        `wait_until_staged` must be called before parameters or optimizer state change.

        Args:
            exported: a checkpoint, this one or an earlier one, to make the run's Hugging Face directory afterwards.

        Raises:
            RunFailure: this one, or an asynchronous one before it, could not be written; on every rank, with the
                cause. Complete checkpoints are untouched.
        """
        self.finish_save()
        tensors = self.stage(model, optimizer)
        carry_out = partial(self._carry_out, progress=progress, tied=tied_names(model), exported=exported)
        if self._stager is None:
            carry_out(tensors)
        else:
            # A forward pass may change buffers, and the next one begins before the copy of the others is made.
            tensors["model"].update({name: buffer.clone() for name, buffer in persistent_buffers(model).items()})
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the copying stream does not wait for the optimizer's kernels
            if STAGER_WORKS_ONCE:
                self._stager.close()
                self._stager = _build_stager()
            staged = self._staged = cast("Future[Tensors]", self._stager.stage(tensors))
            self._saved = self._saver.submit(lambda: carry_out(self.collect(staged)))
        return self.store.path(progress.step)

    def stage(self, model: nn.Module, optimizer: Optimizer) -> Tensors:
        """The tensors to save, nested as DCP flattens them to ``model.…`` and ``optimizer.…``. Collective.

        They share the live storage, so they must be copied or written before the next optimizer step.
        """
        with agreement():
            tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
        return tensors

    def collect(self, staged: Future[Tensors]) -> Tensors:
        """A background save's copy, once it is made on every rank. Collective."""
        with agreement(self._group):
            tensors = staged.result()
        return tensors

    def wait_until_staged(self) -> None:
        """Return when parameters and optimizer state may change: to be called before each optimizer step.

        What went wrong is told by `finish_save`.
        """
        if self._staged is not None:
            wait([self._staged])

    def has_failed(self) -> bool:
        """Whether a background save is over and failed, as far as this rank knows; `finish_save` then raises."""
        return self._saved is not None and self._saved.done() and self._saved.exception() is not None

    def finish_save(self) -> None:
        """Wait for a background save, if one is under way. Collective.

        Raises:
            RunFailure: it failed; on every rank, with the cause.
        """
        saved, self._saved, self._staged = self._saved, None, None
        if saved is not None:
            saved.result()

    def finish(self) -> None:
        """Wait for all that is under way: a save, and the deletion of old checkpoints. Raises as `finish_save`."""
        self.finish_save()
        self.finish_sweep()

    def finish_sweep(self) -> None:
        """Wait until what was thrown away is deleted. On any rank; no collective."""
        if self._sweep is not None:
            self._sweep.result()

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
        with agreement():
            path = to_path(resume)
        check_together(path)
        return path

    def _newest_usable(self) -> Path | None:
        found: list[Path] = []
        with agreement():
            if rank() == 0:
                self.store.recover()
                self._start_sweeping()  # a run that was killed may not have come to it
                found = [path for _, path in reversed(self.store.published())]
        damage: UserError | None = None
        for path in gather_objects(found)[0]:
            try:
                check_together(path)
                return path
            except UserError as error:
                if rank() == 0:
                    logger.warning("%s: skipped: %s: %s", path.name, error.where, error.what)
                damage = damage or error
        if damage is not None:  # starting over in silence would give up what was trained
            todo = "restore that file, or remove its directory, or start over in another run.dir"
            raise UserError(damage.where, f"{damage.what}, and no older checkpoint is whole", todo)
        return None

    def restore(self, path: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
        """Load model and optimizer in place, at any world size, and return the progress. Collective.

        Hyper-parameters (learning rate, weight decay, …) stay those of `optimizer`.

        Raises:
            UserError: the checkpoint is unusable, of another run, or of another model; the error names the difference.
            RunFailure: a file cannot be read.
        """
        with in_use(path):
            with agreement():
                manifest = read_manifest(path)
                contents = {"contents_saved": manifest.environment.get("contents")}
                contents["contents"] = self.environment.get("contents")
                check_same_run(path, saved=manifest.identity, current=self.identity, **contents)
                progress = _read_progress(path, manifest)
            parts = self.stage(model, optimizer).items()
            load_all(path, {f"{part}.{name}": tensor for part, named in parts for name, tensor in named.items()})
        if path.resolve().parent == self.store.root.resolve():
            self._reached = manifest.step
        return progress

    def export(self, checkpoint: Path, *, check: bool = False) -> None:
        """Make a checkpoint the run's Hugging Face directory, unless it is that already. Collective.

        Args:
            check: compare every byte with the manifest's checksums, of a checkpoint that was not just written or read.
        """
        dtype = self.export_dtype or "float32"
        try:
            is_new = ensure_export(checkpoint, self._group, out=self.out, dtype=dtype, check=check)
        except UserError:
            raise
        except Exception as error:
            todo = f"free space there, and start the run again: it exports {checkpoint}, which is whole"
            raise self._failure(f"{self.out}: was not exported", error, self.out.parent, todo) from error
        if is_new:
            self._tell(f"exported {checkpoint.name} to {self.out} ({dtype})")
        self.exported = checkpoint

    def _carry_out(self, tensors: Tensors, *, progress: Progress, tied: dict[str, str], exported: Path | None) -> None:
        """Write and publish a checkpoint, throw away what is not kept, and export it if that was asked for.

        Raises:
            RunFailure: it could not be saved, on every rank; what the attempt took of the disk is free again.
        """
        path, began = self.store.path(progress.step), time.monotonic()
        try:
            self.write(tensors, progress.step)
            size = self.complete(progress, tied=tied)
        except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception
            # Every way to fail is agreed on, so no rank is still writing.
            what = f"{path}: the checkpoint was not saved"
            failure = self._failure(what, error, self.store.root, self._what_to_do(error))
            if rank() == 0:
                self.store.abandon(progress.step)
            raise failure from error
        self.saved = path
        self._tell(f"saved {path} ({size_text(size)} in {time.monotonic() - began:.1f} s)")
        if exported is not None:
            self.export(exported, check=exported != path)

    def write(self, tensors: Tensors, step: int) -> None:
        """Write tensors, synced, to the step's temporary directory; every rank its own file."""
        with agreement(self._group):
            if rank() == 0:
                self.store.begin(step, after=self._reached)
        save_tensors(tensors, self.store.temporary(step), group=self._group)

    def complete(self, progress: Progress, *, tied: dict[str, str]) -> int:
        """Complete the temporary directory with assets and, last, the manifest; publish it; apply the retention.

        Returns:
            Bytes of the checkpoint's tensors.
        """
        step = progress.step
        directory = self.store.temporary(step)
        with agreement(self._group):
            own = record_files(directory, directory.glob(f"__{rank()}_*.distcp"))
        records = {name: one for of_rank in gather_objects(own, group=self._group) for name, one in of_rank.items()}
        with agreement(self._group):
            if rank() == 0:
                if self._settings.is_file():
                    (directory / self._settings.name).write_bytes(self._settings.read_bytes())
                (directory / "hf").mkdir()
                fill(directory / "hf", self.write_assets)
                manifest = Manifest(
                    step=step,
                    progress=asdict(progress),
                    identity=self.identity,
                    tied=tied,
                    export_dtype=self.export_dtype,
                    files=records,
                    environment=self.environment,
                    kept_in_float32=self._kept,
                )
                _check_shared(directory, manifest)
                write_manifest(directory, manifest)
                self.store.publish(step, after=self._reached)
                self.store.retain(self.section.keep, every=self.section.keep_every, best=progress.best_step)
                self._start_sweeping()
        self._reached = step
        return sum(record.size for record in records.values())

    def _start_sweeping(self) -> None:
        """Delete what was thrown away, beside whatever comes next. On one rank only; no collective."""
        self._sweep = self._sweeper.submit(self.store.sweep)

    def _failure(self, what: str, error: BaseException, disk: Path, todo: str) -> RunFailure:
        """What to raise for a save or an export that failed. Collective, before rank 0 frees its part of the disk."""
        kind = StorageFailure if is_storage_failure(error, disk, group=self._group) else RunFailure
        return kind(f"{what}: {first_failure(error)}{' (its disk is full)' if is_full(disk) else ''}; {todo}")

    def _what_to_do(self, error: BaseException) -> str:
        mend = f"free space there, or mend {self.store.root}, and start the run again"
        if is_lost_rank(error):
            mend = "see why a rank ended or did not answer (run.timeout_minutes), and start the run again"
        try:
            complete = self.store.complete()
        except Exception:  # what hindered the save may hinder this, too
            complete = []
        return f"{mend}: it resumes from {complete[-1][1].name}" if complete else mend


def _build_stager() -> DefaultStager:
    """What copies tensors to host memory in a thread of its own."""
    on_device = torch.cuda.is_available()  # a Mac's accelerator is not trained on
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_device,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=on_device,
        )
    )


def _read_progress(path: Path, manifest: Manifest) -> Progress:
    known = {field.name for field in fields(Progress)}
    if differing := sorted((known ^ manifest.progress.keys()) - _LATER):
        what = f"records another kind of progress: {', '.join(differing)} is not in both"
        raise UserError(str(path), what, "use the fsdp2kit that it was written by")
    return Progress(**manifest.progress)


def _check_shared(directory: Path, manifest: Manifest) -> None:
    """Check that rank 0 sees what every rank wrote, before it says so in a manifest."""
    try:
        check_sizes(directory, manifest)
    except UserError as error:
        reason = "checkpoints must be on a filesystem that all nodes share"
        raise RunFailure(f"{error.where}: {error.what}: {reason}") from error
