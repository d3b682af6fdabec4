"""Saving, finding and restoring a run's checkpoints; every public method is a collective over all ranks.

A save has three parts, kept apart: `stage` (which tensors), and in the writer, here or in a thread, `write` (into a
temporary directory, all ranks) and `publish` (assets, manifest, rename, retention; rank 0). A crash at any point
leaves the complete checkpoints as they were, and never a new one that looks complete and is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp2kit.checkpoint.background import BackgroundSave
from fsdp2kit.checkpoint.contents import copied_buffers, model_tensors, optimizer_tensors
from fsdp2kit.checkpoint.export_record import check_replaceable
from fsdp2kit.checkpoint.files import in_use
from fsdp2kit.checkpoint.layout import CheckpointLayout
from fsdp2kit.checkpoint.loading import check_together, load_all
from fsdp2kit.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from fsdp2kit.checkpoint.places import check_writable, is_remote, to_place
from fsdp2kit.checkpoint.remote_layout import RemoteLayout
from fsdp2kit.checkpoint.writer import CheckpointWriter, Contents, Export, Retention
from fsdp2kit.config.schema import CheckpointConfig
from fsdp2kit.distributed import agreement, background_group, gather_objects
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import tied_names
from fsdp2kit.parallel.float8 import refresh_scales
from fsdp2kit.progress import Progress

logger = logging.getLogger(__name__)


def build_checkpoint_manager(
    section: CheckpointConfig,
    *,
    run_dir: Path,
    identity: dict[str, str],
    write_assets: Callable[[Path], None],
    export_dtype: str | None = None,
    environment: dict[str, Any] | None = None,
) -> CheckpointManager:
    """The manager of ``checkpoint.dir``, by default ``run_dir/checkpoints``. Collective.

    Args:
        identity: what may not change when the run is resumed, by name, e.g. ``{"data.seq_len": "512"}``.
        write_assets: writes config, tokenizer, chat template and generation config of an export into a directory.
            Called on rank 0 alone, so it must not contain a collective.
        export_dtype: default dtype of an export where the section names none, e.g. the source model's.
        environment: versions, mesh, …, kept in the manifest so that a resumed run can tell what changed.

    Raises:
        UserError: a rank cannot write there, or where the export goes, or that holds what it must not replace.
    """
    export_dtype = section.export_dtype or export_dtype
    with agreement():
        root = to_place(section.dir) if section.dir else run_dir / "checkpoints"
        check_writable(root, where="checkpoint.dir" if section.dir else "run.dir")
        exports = Exports(
            when=section.export_hf,
            out=to_place(section.export_dir) if section.export_dir else run_dir / "hf",
            dtype=export_dtype or "float32",
        )
        if exports.when != "never":
            if not is_remote(exports.out):  # written beside it; a store has answered, and is left as it is until then
                check_writable(exports.out.parent, where="checkpoint.export_dir" if section.export_dir else "run.dir")
            check_replaceable(exports.out)
    group = background_group() if section.async_save else None
    writer = CheckpointWriter(
        RemoteLayout(root) if is_remote(root) else CheckpointLayout(root),
        retention=Retention(keep=section.keep, every=section.keep_every),
        identity=identity,
        write_assets=write_assets,
        export_dtype=export_dtype,
        config_file=run_dir / "config.toml",
        environment=environment or {},
        group=group,
    )
    background = BackgroundSave(writer.save, group=group) if section.async_save else None
    return CheckpointManager(writer, background, exports)


@dataclass(frozen=True, kw_only=True)
class Exports:
    """Which checkpoints of a run become a Hugging Face directory, where that goes, and in which dtype."""

    when: Literal["final", "every", "never"]
    out: Path
    dtype: str


class CheckpointManager:
    """Saves, resolves and restores; see `build_checkpoint_manager`. As a context manager it ends with `finish`.

    Args:
        background: None: `save` returns when the checkpoint is published.
    """

    def __init__(self, writer: CheckpointWriter, background: BackgroundSave | None, exports: Exports) -> None:
        self.exports = exports
        self._writer = writer
        self._layout = writer.layout
        self._background = background

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
        self, model: nn.Module, optimizer: Optimizer, progress: Progress, *, export: Export | None = None
    ) -> Path:
        """Write and publish the checkpoint of ``progress.step``, and throw away those that are not kept. Collective.

        With ``checkpoint.async_save`` it returns before that: the next `save`, or `finish`, waits for it, and
        `wait_until_staged` must be called before parameters or optimizer state change.

        Args:
            export: called with the published checkpoint and the process group that its collectives must use.

        Raises:
            RunFailure: this one, or an asynchronous one before it, could not be written; on every rank, with the
                cause. Complete checkpoints are untouched.
        """
        self.finish_save()
        tensors = self.stage(model, optimizer)
        contents = Contents(tensors=tensors, progress=progress, tied=tied_names(model), export=export)
        if self._background is None:
            return self._writer.save(contents)
        # A forward pass may change buffers, and the next one begins before the copy of the others is made.
        tensors["model"].update(copied_buffers(model))
        self._background.start(contents)
        return self._layout.path(progress.step)

    def stage(self, model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
        """The tensors to save, nested as DCP flattens them to ``model.…`` and ``optimizer.…``. Collective.

        They share the live storage, so they must be copied or written before the next optimizer step.
        """
        with agreement():
            tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
        return tensors

    def wait_until_staged(self) -> None:
        """Return when parameters and optimizer state may change: to be called before each optimizer step."""
        if self._background is not None:
            self._background.wait_until_staged()

    def has_failed(self) -> bool:
        """Whether an asynchronous save has failed, as far as this rank knows; `finish_save` then raises."""
        return self._background is not None and self._background.has_failed()

    def finish_save(self) -> None:
        """Wait for an asynchronous save, if one is under way. Collective.

        Raises:
            RunFailure: it failed; on every rank, with the cause.
        """
        if self._background is not None:
            self._background.finish()

    def finish(self) -> None:
        """Wait for all that is under way: a save, and the deletion of old checkpoints. Raises as `finish_save`."""
        self.finish_save()
        self._writer.finish_sweeping()

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
            path = to_place(resume)
        check_together(path)
        return path

    def restore(self, path: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
        """Load model and optimizer in place, at any world size, and return the progress. Collective.

        Hyper-parameters (learning rate, weight decay, …) stay those of `optimizer`.

        Raises:
            UserError: the checkpoint is unusable, of another run, or of another model; the error names the difference.
            RunFailure: a file cannot be read.
        """
        with in_use(path / MANIFEST):
            with agreement():
                manifest = read_manifest(path)
                check_same_run(path, saved=manifest.identity, current=self._writer.identity)
                progress = _read_progress(path, manifest)
            parts = self.stage(model, optimizer).items()
            load_all(path, {f"{part}.{name}": tensor for part, named in parts for name, tensor in named.items()})
        refresh_scales(model)
        if path.resolve().parent == self._layout.root.resolve():
            self._writer.reached = manifest.step
        return progress

    def _newest_usable(self) -> Path | None:
        found: list[Path] = []
        with agreement():
            if _rank() == 0:
                self._layout.recover()
                self._writer.start_sweeping()  # a run that was killed may not have come to it
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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
