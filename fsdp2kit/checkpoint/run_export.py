"""A run's Hugging Face export: when it is made, from which checkpoint, and which lines the user reads about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.hf import export_checkpoint
from fsdp2kit.checkpoint.manifest import holds_best
from fsdp2kit.checkpoint.space import storage_failure
from fsdp2kit.checkpoint.store import CheckpointStore
from fsdp2kit.config import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import fsspec_url
from fsdp2kit.job.distributed import gather_objects, rank
from fsdp2kit.job.events import Events
from fsdp2kit.job.progress import Progress
from fsdp2kit.job.stop import Stopped


class RunExport:
    """The export of a run.

    Args:
        store: of the run's checkpoints.
        out: where it goes.
        dtype: of its weights.
        parts_dir: as in `fsdp2kit.checkpoint.hf.dcp_to_hf`.
        group: of all ranks, for collectives beside training. Default: the default group.
        tell: called on every rank with a line for each export.
        events: of the run.
    """

    def __init__(
        self,
        config: TrainingConfig,
        store: CheckpointStore,
        out: ExportDirectory,
        *,
        dtype: str,
        parts_dir: Path | None,
        group: dist.ProcessGroup | None,
        tell: Callable[[str], object],
        events: Events,
    ) -> None:
        self.out = out
        self.dtype = dtype
        self.exported: Path | None = None
        """The checkpoint that the export was made from."""
        self.was_left = False
        """Whether the last export was left, because the run is asked to stop."""
        section = config.checkpoint
        self._when = section.export_hf
        self._takes_best = config.eval.keeps_best if section.export is None else section.export == "best"
        self._repository = section.push_to_hub
        self._store = store
        self._parts_dir = parts_dir
        self._group = group
        self._tell = tell
        self._events = events
        self._progress: Progress | None = None  # the newest when an export was last due

    def export_due(
        self, progress: Progress, newest: Path, *, resumed: Path | None, is_over: bool, must_replace: bool
    ) -> None:
        """Make the export that is due, now that the newest checkpoint is written, unless it is there. Collective.

        If the run is asked to stop, the export is left, and the former one stays; the next start makes it.

        Args:
            progress: at the newest checkpoint.
            resumed: the checkpoint that the run resumed from.
            is_over: this is the run's end, which is when ``export_hf = "final"`` exports.
            must_replace: False: what must not be replaced there is a warning, and no error.
        """
        checkpoint = self._due(progress, newest, resumed, is_over=is_over)
        if checkpoint is None:
            return
        began = time.monotonic()
        check = checkpoint != newest  # which was just written, or checked for a resume
        try:
            is_new = not self.out.holds(checkpoint, self.dtype, self._group)
            if is_new:
                export_checkpoint(
                    checkpoint, self.out, self._group, dtype=self.dtype, parts_dir=self._parts_dir, check=check
                )
        except Stopped:  # on all ranks
            self.was_left = True
            self._tell(f"left the export of {checkpoint.name}: the run is asked to stop; the next start makes it")
            return
        except UserError as error:
            if must_replace:
                raise
            self._tell(f"warning: not exported: {error}; training goes on")
            return
        except Exception as error:
            what = f"{self.out.path}: was not exported"
            todo = f"free space there, and start the run again: it exports {checkpoint}, which is whole"
            raise storage_failure(what, error, self.out.path.parent, todo, group=self._group) from error
        if is_new:
            self._tell(f"exported {checkpoint.name} to {self.out.path} ({self.dtype})")
            step = int(checkpoint.name.rpartition("-")[2])
            self._events.record("export", step=step, path=str(self.out.path), seconds=time.monotonic() - began)
        self.exported = checkpoint

    def _due(self, progress: Progress, newest: Path, resumed: Path | None, *, is_over: bool) -> Path | None:
        """The checkpoint to export; None if none is due. Collective."""
        if self._when == "never" or (self._when == "final" and not is_over):
            return None
        self._progress = progress
        if not self._takes_best or progress.best_step in (None, progress.step):
            return newest
        best = self._store.path(progress.best_step)
        candidates = (best, resumed.parent / best.name) if resumed else (best,)
        # Rank 0 answers for all: a file system may show the others an older state of the directory.
        found = next((one for one in candidates if holds_best(one, progress)), newest) if rank() == 0 else newest
        return gather_objects(found, group=self._group)[0]

    def describe(self, kind: str, *, can_answer: bool, is_over: bool, maximizes: str | None) -> list[str]:
        """Where the export is, and how to try it; of a run that is over, it is first uploaded. On one rank only.

        Args:
            kind: what it holds, "model" or "adapter".
            can_answer: whether it has a tokenizer.
            maximizes: as in `Progress.describe_best`.
        """
        if self.exported is None:
            return []
        lines = [f"{kind}: {self.out.path}, of {self._describe_step(self.exported, maximizes)}"]
        if can_answer and fsspec_url(self.out.path) is None:  # `generate` reads disks only
            lines.append(f'try it: fsdp2kit generate {self.out.path} "…"')
        if is_over and self._repository:
            lines.append(self.out.upload(self._repository))
        return lines

    def _describe_step(self, exported: Path, maximizes: str | None) -> str:
        """The step of an export, and where evaluations were compared, whether it is the best."""
        progress = self._progress
        if progress is None or progress.best_step is None:
            return exported.name
        name = self._store.path(progress.best_step).name
        best = f"{name}, the best ({progress.describe_best(maximizes)})"
        if name == exported.name:
            return best
        return f"{exported.name}, the last; {'no checkpoint was kept' if self._takes_best else 'not'} of {best}"
