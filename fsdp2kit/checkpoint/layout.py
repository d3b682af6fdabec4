"""The `checkpoints/` directory: names, publication, leftovers, retention. Rank 0's file work only; no torch here.

A checkpoint is written to ``.tmp-step-000200``, completed by its manifest and renamed to ``step-000200``. One that is
written a second time first moves to ``.old-step-000200``, from where `recover` brings it back after a crash. One that
is not kept is renamed to ``.tmp-…`` before it is deleted. So whatever a crash leaves half done has a name with a dot,
and a step directory without a manifest is none of our doing: it is set aside, never deleted.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from fsdp2kit.checkpoint.files import sync
from fsdp2kit.checkpoint.manifest import MANIFEST

logger = logging.getLogger(__name__)

STEP = re.compile(r"step-(\d{6,})")
OLD, TEMPORARY, SUPERSEDED = ".old-", ".tmp-", "superseded-"
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
                shutil.rmtree(old)
            else:
                self._set_incomplete_aside()
                old.rename(path)
                logger.warning("%s: brought back, since its replacement was not completed", path)

    def clear_leftovers(self) -> None:
        """Delete what earlier saves left unfinished, and set aside step directories without a manifest."""
        self.recover()
        for path in self.root.glob(f"{TEMPORARY}step-*"):
            logger.warning("%s: removed, since it was never completed", path)
            shutil.rmtree(path)
        self._set_incomplete_aside()

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
            shutil.rmtree(old)
        return path

    def retain(self, keep: int, *, best: int | None = None) -> None:
        """Delete all complete checkpoints but the newest `keep` and the one of the step `best`.

        One that cannot be deleted is reported, no more.
        """
        for step, path in self.complete()[:-keep]:
            if step == best:
                continue
            doomed = path.with_name(f"{TEMPORARY}{path.name}")
            try:
                path.rename(doomed)  # whatever interrupts the deletion, the next save goes on with it
                shutil.rmtree(doomed)
            except OSError as error:
                logger.warning("%s: an old checkpoint was not deleted: %s", path, error)
