"""A run's checkpoints and its Hugging Face export: what a run resumes from, saves, keeps and exports.

A save has three parts, kept apart: `stage` lists the tensors, `write` writes them and the assets to a directory of its
own (all ranks), and `complete` adds the manifest, publishes it and applies the retention (rank 0). The last two run at
once or in a thread. A crash at any point leaves complete checkpoints untouched, and no new one that only looks
complete.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.optim import Optimizer
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.background import BackgroundSave, Tensors
from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.export_plan import DTYPES
from fsdp2kit.checkpoint.identity import changed_settings, check_same_run, describe_resumed
from fsdp2kit.checkpoint.manifest import (
    Manifest,
    check_shared,
    in_use,
    read_manifest,
    read_progress,
    record_files,
    write_manifest,
)
from fsdp2kit.checkpoint.run_export import RunExport
from fsdp2kit.checkpoint.space import check_room, storage_failure, what_to_do
from fsdp2kit.checkpoint.state import (
    check_together,
    fill_weights,
    load_all,
    model_tensors,
    optimizer_tensors,
    persistent_buffers,
    save_tensors,
)
from fsdp2kit.checkpoint.store import open_store
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.sections.checkpoint import CHECKPOINTS, EXPORT
from fsdp2kit.console import say, size_text
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import check_writable, fill, to_path
from fsdp2kit.job import status
from fsdp2kit.job.distributed import agreement, gather_objects, is_lost_rank, rank
from fsdp2kit.job.events import Events
from fsdp2kit.job.progress import Progress
from fsdp2kit.weights.record import manifest_fields, weights_of
from fsdp2kit.weights.recorded_parts import RECORD

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run and its export; see `build_checkpoints`.

    Every public method is a collective, unless it says otherwise. A context manager that `finish`es.

    Args:
        model: materialised (and sharded); so is what `optimizer` updates.
        identity: what may not change when the run is resumed, by name, e.g. ``{"data.seq_len": "512"}``.
        write_assets: writes config, tokenizer, chat template and generation config of an export into a directory.
            Called on rank 0 alone, so it must not contain a collective.
        environment: versions, mesh, …, kept in the manifest so that a resumed run can tell what changed.
        source_dtype: dtype of an export where ``checkpoint.export_dtype`` names none.
        read: directories that the run reads models from, which an export must not replace.
        notes: what an export has that its source lacks, a line each.
        can_answer: whether an export has a tokenizer.
        total_steps: of the whole run. Default: ``train.steps``; under ``train.epochs`` only the data tell.
        tell: called on every rank with a line for each checkpoint and each export that was written.
        events: of the run, if they are kept.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: PreTrainedModel,
        optimizer: Optimizer,
        *,
        identity: dict[str, str],
        write_assets: Callable[[Path], None],
        environment: dict[str, Any] | None = None,
        source_dtype: str | None = None,
        read: Iterable[Path | None] = (),
        notes: Sequence[str] = (),
        can_answer: bool = False,
        total_steps: int | None = None,
        tell: Callable[[str], object] = say,
        events: Events | None = None,
    ) -> None:
        section = config.checkpoint
        run_dir = Path(config.run.dir)
        with agreement():
            root = to_path(section.dir) if section.dir else run_dir / CHECKPOINTS
            check_writable(root, where="checkpoint.dir" if section.dir else "run.dir")
            out = ExportDirectory(to_path(section.export_dir) if section.export_dir else run_dir / EXPORT)
            if section.export_hf != "never":
                where = "checkpoint.export_dir" if section.export_dir else "run.dir"
                out.check_writable(where=where)
                out.check_apart(root)
                out.check_replaceable(read=read)
        self.store = open_store(root)
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.identity = identity
        self.environment = environment or {}
        self.notes = [*notes]
        self.can_answer = can_answer
        self.total_steps = total_steps
        self._events = events or Events()
        self.export_dtype = section.export_dtype or source_dtype
        self.resumed: Path | None = None
        """The checkpoint that `start` resumed from."""
        self.saved: Path | None = None
        """The checkpoint that was written last."""
        self._write_assets = write_assets
        self._tell = tell
        self._facts = manifest_fields(model)
        self._reached = 0  # this run's last step: complete checkpoints after it are of another history
        self._sweeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fsdp2kit-sweep")
        self._sweep: Future[None] | None = None
        self._background = BackgroundSave() if section.async_save else None
        self._group = self._background.group if self._background else None
        recorded = self.environment.get(RECORD, {}).get("directory")
        self.run_export = RunExport(
            config,
            self.store,
            out,
            dtype=self.export_dtype or "float32",
            parts_dir=Path(recorded) if recorded else None,
            group=self._group,
            tell=tell,
            events=self._events,
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish()
        except Exception as failure:
            if kind is None:
                raise
            if not is_lost_rank(failure):  # the run's own error is raised
                logger.warning("%s", failure)

    # Start

    def start(self) -> Progress:
        """Fill model and optimizer from what ``run.resume`` means, else the model with what ``model.weights`` names.

        Raises:
            UserError: the checkpoint or the weights cannot be used; the error says what differs. Or the disk has no
                room for one checkpoint.
        """
        status.begin("loading weights")
        self.resumed = self.resolve(self.config.run.resume)
        with agreement():
            if rank() == 0:
                self.notes += self._check_room()
        if (
            self.resumed is None or weights_of(self.model).adapter is not None
        ):  # its checkpoints hold the adapter alone
            fill_weights(self.config.model, self.model, seed=self.config.run.seed)
        return self.restore(self.resumed) if self.resumed else Progress()

    def resolve(self, resume: str) -> Path | None:
        """The checkpoint that `run.resume` means, every byte of it checked; the same on all ranks.

        Args:
            resume: "auto": the newest checkpoint that is whole, None if there was never one; "never": None; or a path.
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
                self._sweep = self._sweeper.submit(self.store.sweep)  # a killed run may not have come to it
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
        if damage is not None:  # starting over in silence would lose what was trained
            todo = "restore that file, or remove its directory, or start over in another run.dir"
            raise UserError(damage.where, f"{damage.what}, and no older checkpoint is whole", todo)
        return None

    def _check_room(self) -> list[str]:
        """`check_room`, unless nothing will be saved."""
        done = read_manifest(self.resumed).step if self.resumed else 0
        total = self.config.train.steps if self.total_steps is None else self.total_steps
        if total is not None and done >= total:
            return []
        out = self.run_export.out.path
        dtype = DTYPES[self.run_export.dtype]
        return check_room(self.config, self.model, self.store, out, export_dtype=dtype, make_room=self.finish_sweep)

    def restore(self, path: Path) -> Progress:
        """Load model and optimizer in place, at any world size, and return the progress.

        Hyper-parameters (learning rate, weight decay, …) stay those of the optimizer.
        """
        with in_use(path):
            with agreement():
                manifest = read_manifest(path)
                check_same_run(
                    path,
                    saved=manifest.identity,
                    current=self.identity,
                    contents_saved=manifest.environment.get("contents"),
                    contents=self.environment.get("contents"),
                    changed=changed_settings(path, self.config),
                )
                progress = read_progress(path, manifest)
            parts = self.stage().items()
            load_all(path, {f"{part}.{name}": tensor for part, named in parts for name, tensor in named.items()})
        if path.resolve().parent == self.store.root.resolve():
            self._reached = manifest.step
        return progress

    def describe(self) -> list[str]:
        """Lines for the start: what exports add, what a disk has no room for, what changed since a checkpoint."""
        if self.resumed is None:
            return [*self.notes]
        return [*self.notes, describe_resumed(self.resumed, self.config, self.environment)]

    # Save

    def save(self, progress: Progress, *, is_over: bool = False) -> Path:
        """Save the run as it stands, throw away the checkpoints that are not kept, and export what is due.

        With ``checkpoint.async_save`` it returns before that: the next `save`, or `finish`, waits for it, and
        `wait_until_staged` must be called before parameters or optimizer state change. A save that cannot be written
        is a `RunFailure` on every rank, with the cause; complete checkpoints are untouched.

        Args:
            progress: with wandb's id and the state of the data, if there are any.
            is_over: this is the run's end, which is when ``export_hf = "final"`` exports.
        """
        self.finish_save()
        tensors = self.stage()
        if self._background is None:
            self._write_and_publish(tensors, progress, is_over)
        else:
            # A forward pass may change buffers, and the next one begins before the copy is made.
            buffers = persistent_buffers(self.model)
            tensors["model"].update({name: buffer.clone() for name, buffer in buffers.items()})
            self._background.begin(tensors, self._write_and_publish, progress, is_over)
        return self.store.path(progress.step)

    def stage(self) -> Tensors:
        """The tensors to save, nested as DCP flattens them to ``model.…`` and ``optimizer.…``.

        They share the live storage, so they must be copied or written before the next optimizer step.
        """
        with agreement():
            # The model first: that also frees units that a forward left gathered.
            tensors = {"model": model_tensors(self.model)}
            tensors["optimizer"] = optimizer_tensors(self.model, self.optimizer)
        return tensors

    def wait_until_staged(self) -> None:
        """Return when parameters and optimizer state may change. Call it before each optimizer step; no collective.

        `finish_save` reports what went wrong.
        """
        if self._background is not None:
            self._background.wait_until_staged()

    def has_failed(self) -> bool:
        """Whether a background save is over and failed, as far as this rank knows; `finish_save` then raises."""
        return self._background is not None and self._background.has_failed()

    def finish_save(self) -> None:
        """Wait for a background save, if one is under way; a failure is raised on every rank."""
        if self._background is not None:
            self._background.finish()

    def finish(self) -> None:
        """Wait for all that is under way: a save, and the deletion of old checkpoints. Raises as `finish_save`."""
        self.finish_save()
        self.finish_sweep()

    def finish_sweep(self) -> None:
        """Wait until what was thrown away is deleted. On any rank; no collective."""
        if self._sweep is not None:
            self._sweep.result()

    def _write_and_publish(self, tensors: Tensors, progress: Progress, is_over: bool) -> None:
        """Write and publish a checkpoint, throw away what is not kept, and export what is due."""
        path = self.store.path(progress.step)
        began = time.monotonic()
        try:
            self.write(tensors, progress.step)
            size = self.complete(progress)
        except (Exception, dcp.CheckpointException) as error:  # DCP's own error is no `Exception`
            # Every way to fail is agreed on, so no rank is still writing.
            what = f"{path}: the checkpoint was not saved"
            todo = what_to_do(error, self.store)
            failure = storage_failure(what, error, self.store.root, todo, group=self._group)
            if rank() == 0:
                self.store.abandon(progress.step)
            raise failure from error
        self.saved = path
        seconds = time.monotonic() - began
        best = progress.best_step == progress.step
        self._tell(f"saved {path} ({size_text(size)} in {seconds:.1f} s)")
        fields = {"bytes": size, "seconds": seconds, "best": best, "background": self._background is not None}
        waited = self._background.waited if self._background else seconds
        self._events.record("save", step=progress.step, **fields, waited=waited)
        self.run_export.export_due(progress, path, resumed=self.resumed, is_over=is_over, must_replace=is_over)

    def write(self, tensors: Tensors, step: int) -> None:
        """Write the step's temporary directory: settings and assets, and tensors, synced; every rank its own file."""
        directory = self.store.temporary(step)
        settings = Path(self.config.run.dir, "config.toml")
        with agreement(self._group):
            if rank() == 0:
                self.store.begin(step, after=self._reached)
                if settings.is_file():
                    (directory / settings.name).write_bytes(settings.read_bytes())
                (directory / "hf").mkdir()
                fill(directory / "hf", self._write_assets)
        save_tensors(tensors, directory, group=self._group)

    def complete(self, progress: Progress) -> int:
        """Complete the temporary directory with the manifest; publish it; apply the retention.

        Returns:
            Bytes of the checkpoint's tensors.
        """
        step = progress.step
        section = self.config.checkpoint
        directory = self.store.temporary(step)
        with agreement(self._group):
            # By name: a listing on each rank would read the names of all ranks' files.
            names = (directory / f"__{rank()}_{number}.distcp" for number in itertools.count())
            own = record_files(directory, itertools.takewhile(lambda path: path.is_file(), names))
        records = {name: one for of_rank in gather_objects(own, group=self._group) for name, one in of_rank.items()}
        with agreement(self._group):
            if rank() == 0:
                manifest = Manifest(
                    step=step,
                    progress=asdict(progress),
                    identity=self.identity,
                    export_dtype=self.export_dtype,
                    files=records,
                    environment=self.environment,
                    **self._facts,
                )
                check_shared(directory, manifest)
                write_manifest(directory, manifest)
                self.store.publish(step, after=self._reached)
                best = progress.best_step if self.config.eval.keeps_best else None
                self.store.retain(section.keep, every=section.keep_every, best=best)
                self._sweep = self._sweeper.submit(self.store.sweep)
        self._reached = step
        return sum(record.size for record in records.values())

    # Export

    @property
    def left_an_export(self) -> bool:
        """Whether the last export was left, because the run is asked to stop."""
        return self.run_export.was_left

    def export_resumed(self, progress: Progress, *, is_over: bool) -> None:
        """Export what is due of a run that was resumed, where that was not done.

        This completes a run that was killed between a checkpoint and its export, or that now asks for another dtype.

        Args:
            progress: as `start` returned it.
        """
        resumed = self.resumed
        if resumed is not None:
            self.finish_save()  # one that is under way may have the best step, and uses the same group
            self.run_export.export_due(progress, resumed, resumed=resumed, is_over=is_over, must_replace=True)

    def describe_end(self, *, is_over: bool, maximizes: str | None = None) -> list[str]:
        """What the run leaves behind: the newest checkpoint, the export, and how to try it. On one rank only.

        Where ``checkpoint.push_to_hub`` asks for it, the export of a run that is over is uploaded first.

        Args:
            maximizes: as in `Progress.describe_best`.
        """
        newest = self.saved or self.resumed
        lines = [f"checkpoint: {newest}"] if newest else []
        kind = "model" if weights_of(self.model).adapter is None else "adapter"
        can_answer = self.can_answer
        return lines + self.run_export.describe(kind, can_answer=can_answer, is_over=is_over, maximizes=maximizes)
