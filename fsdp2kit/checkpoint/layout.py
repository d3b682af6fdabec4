"""The `checkpoints/` directory: names, publication, leftovers, retention. Rank 0's file work only; no torch here.

A checkpoint is written to ``.tmp-step-000200``, completed by its manifest and renamed to ``step-000200``. One that is
written a second time first moves to ``.old-step-000200``, from where `recover` brings it back after a crash. One that
is not kept is renamed to ``.trash-…``, and `sweep` deletes that when nobody waits for it. So whatever a crash leaves
half done has a name with a dot, and a step directory without a manifest is none of our doing: it is set aside, never
deleted.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from fsdp2kit.checkpoint.files import deletable, sync
from fsdp2kit.checkpoint.manifest import MANIFEST

logger = logging.getLogger(__name__)

STEP = re.compile(r"step-(\d{6,})")
OLD, TEMPORARY, TRASH, SUPERSEDED = ".old-", ".tmp-", ".trash-", "superseded-"
INCOMPLETE = ".incomplete"


class CheckpointLayout:
    """Where a run's checkpoints lie under `root`, and the moves between the places."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """The published checkpoint of a step."""
        return self.root / f"step-{step:06d}"

    def temporary(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self.root / f"{TEMPORARY}step-{step:06d}"

    def published(self) -> list[tuple[int, Path]]:
        """``(step, path)`` of every step directory, complete or not, oldest first."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = STEP.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
        return sorted(found)

    def complete(self) -> list[tuple[int, Path]]:
        """``(step, path)`` of every step directory with a manifest, oldest first."""
        return [(step, path) for step, path in self.published() if (path / MANIFEST).is_file()]

    def recover(self) -> None:
        """Bring back a checkpoint whose replacement was cut short between the two renames of `publish`."""
        for old in self.root.glob(f"{OLD}step-*"):
            path = self.root / old.name.removeprefix(OLD)
            if (path / MANIFEST).is_file():
                self._throw_away(old)
            else:
                self._set_incomplete_aside()
                old.rename(path)
                logger.warning("%s: brought back, since its replacement was not completed", path)

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint of a step to; what earlier saves left unfinished is cleared."""
        self.recover()
        for path in self.root.glob(f"{TEMPORARY}step-*"):
            logger.warning("%s: removed, since it was never completed", path)
            self._throw_away(path)
        self._set_incomplete_aside()
        if not self.root.is_dir():
            logger.warning("%s: was deleted during the run, with all checkpoints in it, and is made again", self.root)
        directory = self.temporary(step)
        directory.mkdir(parents=True)
        return directory

    def abandon(self, step: int) -> None:
        """Free what a failed save took of the disk; what cannot be deleted now, the next save clears."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def _set_incomplete_aside(self) -> None:
        """Rename step directories without a manifest, so that no step's name is taken, and touch them no more."""
        for _, path in self.published():
            if not (path / MANIFEST).is_file():
                number = 1
                while (target := path.with_name(f"{path.name}{INCOMPLETE}-{number}")).exists():
                    number += 1
                path.rename(target)
                logger.warning("%s: set aside as %s, since it has no %s", path, target.name, MANIFEST)

    def set_aside(self, *, after: int) -> None:
        """Rename complete checkpoints of later steps than `after` to ``superseded-step-*``; nothing is deleted.

        A run that starts over, or goes back to an earlier checkpoint, leaves them on another line of history:
        the next automatic resume must not mistake one of them for its newest.
        """
        for step, path in self.complete():
            if step <= after:
                continue
            target, copies = self.root / f"{SUPERSEDED}{path.name}", 1
            while target.exists():
                copies += 1
                target = self.root / f"{SUPERSEDED}{path.name}-{copies}"
            path.rename(target)
            logger.warning("%s: set aside as %s, since the run was taken up before it", path, target.name)

    def publish(self, step: int) -> Path:
        """Rename the completed temporary directory into place, and return that place.

        At every moment between, one complete checkpoint of the step is on the disk where `recover` finds it.
        """
        path, old = self.path(step), self.root / f"{OLD}step-{step:06d}"
        if path.exists():
            path.rename(old)
        self.temporary(step).rename(path)
        sync(self.root)
        if old.exists():
            self._throw_away(old)
        return path

    def retain(self, keep: int, *, every: int = 0, best: int | None = None) -> None:
        """Throw away all complete checkpoints but those that are kept. One that cannot be is reported, no more.

        Args:
            keep: so many of the newest stay.
            every: those whose step is a multiple of this stay; 0: none for that reason.
            best: that of this step stays.
        """
        for step, path in self.complete()[:-keep]:
            if step == best or (every and step % every == 0):
                continue
            try:
                with deletable(path / MANIFEST) as is_free:
                    if is_free:
                        self._throw_away(path)
                    else:
                        logger.warning("%s: kept for now, since another process is reading it", path)
            except OSError as error:
                logger.warning("%s: an old checkpoint was not deleted: %s", path, error)

    def sweep(self) -> None:
        """Delete what was thrown away. It may take long, and may be cut short: the next sweep goes on with it."""
        for path in self.root.glob(f"{TRASH}*"):
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("%s: an old checkpoint was not deleted: %s", path, error)

    def _throw_away(self, path: Path) -> None:
        name, number = path.name.removeprefix(OLD).removeprefix(TEMPORARY), 1
        while (target := self.root / f"{TRASH}{number}-{name}").exists():
            number += 1
        path.rename(target)
