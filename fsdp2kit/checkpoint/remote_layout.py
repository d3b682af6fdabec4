"""Checkpoints on an object store, where a directory cannot be renamed: the manifest, written last, is what completes.

A save is written where it will stay, and first leaves a mark there, so that what a crash leaves without a manifest can
be told from what is not ours. A checkpoint that is not kept loses its manifest first. There are no locks: only one run
at a time may save to a place.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fsdp2kit.checkpoint.layout import SUPERSEDED, CheckpointLayout
from fsdp2kit.checkpoint.manifest import MANIFEST
from fsdp2kit.errors import RunFailure

logger = logging.getLogger(__name__)

BEGUN = ".begun"


class RemoteLayout(CheckpointLayout):
    """The moves of `CheckpointLayout` on an object store."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._trash: list[Path] = []

    def temporary(self, step: int) -> Path:
        """Where it will stay."""
        return self.path(step)

    def recover(self) -> None:
        """Note for deletion what earlier saves left unfinished."""
        for _, path in self.published():
            if not (path / MANIFEST).is_file() and (path / BEGUN).is_file():
                self._trash.append(path)

    def begin(self, step: int, *, after: int = 0) -> Path:
        """The place of a step's checkpoint, empty but for our mark; complete ones of later steps are set aside.

        Raises:
            RunFailure: there is something that no save of ours left.
        """
        self.set_aside(after=after)
        directory = self.path(step)
        if directory.exists() and any(directory.iterdir()):
            if not (directory / BEGUN).is_file():
                raise RunFailure(f"{directory}: holds files that no save left there; move them away")
            _remove(directory)
        self._trash = [path for path in self._trash if path != directory]
        directory.mkdir(parents=True, exist_ok=True)
        (directory / BEGUN).write_text(f"step {step}\n")
        return directory

    def abandon(self, step: int) -> None:
        """Delete what a failed save left, if it came so far as to leave its mark."""
        if (self.path(step) / BEGUN).is_file():
            _remove(self.path(step))

    def set_aside(self, *, after: int) -> None:
        """Copy complete checkpoints of later steps than `after` to ``superseded-step-*`` and delete them here."""
        for step, path in self.complete():
            if step <= after:
                continue
            target, copies = self.root / f"{SUPERSEDED}{path.name}", 1
            while target.exists():
                copies += 1
                target = self.root / f"{SUPERSEDED}{path.name}-{copies}"
            store: Any = path
            store.fs.copy(store.path, f"{target.path}", recursive=True)  # pyright: ignore[reportAttributeAccessIssue]
            (path / MANIFEST).unlink()
            _remove(path)
            logger.warning("%s: set aside as %s, since the run was taken up before it", path, target.name)

    def publish(self, step: int, *, after: int) -> Path:
        """Nothing is left to do: the manifest is there."""
        return self.path(step)

    def sweep(self) -> None:
        """Delete what was thrown away."""
        while self._trash:
            path = self._trash.pop()
            try:
                _remove(path)
            except Exception as error:  # every store has errors of its own
                logger.warning("%s: an old checkpoint was not deleted: %s", path, error)

    def _throw_away(self, path: Path) -> None:
        (path / MANIFEST).unlink()
        self._trash.append(path)


def _remove(path: Path) -> None:
    store: Any = path
    if store.exists():
        store.fs.rm(store.path, recursive=True)
