"""Where checkpoints are kept, on a disk or an object store, and how they are written, published and deleted.

A save `begin`s a directory of its own. Its files are written there, its manifest last, and `publish` makes it the
step's checkpoint: a checkpoint is complete if and only if it has a manifest. The next save recognises by name or mark
what a crash left unfinished, and clears it. Files that no save of ours wrote are set aside, never deleted. A
checkpoint that is no longer kept is moved to the trash, and `sweep` deletes it in the background.

Everything here is file work of one rank. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from fsdp2kit.errors import RunFailure
from fsdp2kit.files.local import sync
from fsdp2kit.files.remote import is_remote, to_path

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{6,})")
OLD = ".old-"
TEMPORARY = ".tmp-"
TRASH = ".trash-"
BEGUN = ".begun"


def open_store(root: str | Path) -> CheckpointStore:
    """The checkpoints under a directory, or under a URL that fsspec knows."""
    root = to_path(root)
    return ObjectStore(root) if is_remote(root) else CheckpointStore(root)


class CheckpointStore:
    """Checkpoints ``step-000200`` in a directory on a disk.

    One is written as ``.tmp-step-000200`` and renamed into place. An older one of the same step first moves to
    ``.old-step-000200``, from where `recover` brings it back after a crash; what is thrown away is ``.trash-…``.
    """

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
        return [(step, path) for step, path in self.published() if is_complete(path)]

    def recover(self) -> None:
        """Bring back a checkpoint whose replacement was cut short between the two renames of `publish`.

        What earlier saves left unfinished is thrown away.
        """
        for old in self.root.glob(f"{OLD}step-*"):
            path = self.root / old.name.removeprefix(OLD)
            if is_complete(path):
                self._throw_away(old)
                continue
            self._set_incomplete_aside()
            old.rename(path)
            logger.warning("%s: brought back, since its replacement was not completed", path)
        for path in self.root.glob(f"{TEMPORARY}step-*"):
            logger.warning("%s: removed, since it was never completed", path)
            self._throw_away(path)

    def begin(self, step: int, *, after: int = 0) -> None:
        """`recover`, and make an empty directory ``temporary(step)``.

        Args:
            after: the last step that this run has behind it; see `publish`.
        """
        self.recover()
        self._set_incomplete_aside()
        if not self.root.is_dir():
            logger.warning("%s: was deleted during the run, with all checkpoints in it, and is made again", self.root)
        self.temporary(step).mkdir(parents=True)

    def abandon(self, step: int) -> None:
        """Delete the files of a failed save; the next save clears what cannot be deleted now."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def publish(self, step: int, *, after: int) -> None:
        """Rename the completed temporary directory into place; checkpoints that it supersedes are set aside.

        At every moment between, one complete checkpoint of the step is on the disk where `recover` finds it.

        Args:
            after: complete checkpoints of later steps than this belong to another history: the run started over, or
                went back to an earlier one. The next automatic resume must not mistake one of them for its newest.
        """
        self._set_superseded_aside(after)
        path = self.path(step)
        old = self.root / f"{OLD}step-{step:06d}"
        if path.exists():
            path.rename(old)
        self.temporary(step).rename(path)
        sync(self.root)
        if old.exists():
            self._throw_away(old)

    def retain(self, keep: int, *, every: int = 0, best: int | None = None) -> None:
        """Throw away all complete checkpoints but those that are kept. A failure is only reported.

        Args:
            keep: the number of newest checkpoints that stay.
            every: checkpoints whose step is a multiple of this stay, too; 0: no such rule.
            best: the checkpoint of this step stays, too.
        """
        for step, path in self.complete()[:-keep]:
            if step == best or (every and step % every == 0):
                continue
            try:
                with deletable(path) as is_free:
                    if is_free:
                        self._throw_away(path)
                    else:
                        logger.warning("%s: kept for now, since another process is reading it", path)
            except OSError as error:
                logger.warning("%s: an old checkpoint was not deleted: %s", path, error)

    def sweep(self) -> None:
        """Delete what was thrown away. If it is cut short, the next sweep goes on."""
        for path in self._trash():
            try:
                self._delete(path)
            except Exception as error:  # every store has errors of its own
                logger.warning("%s: an old checkpoint was not deleted: %s", path, error)

    def _set_superseded_aside(self, after: int) -> None:
        for step, path in self.complete():
            if step > after:
                self._set_aside(path, f"superseded-{path.name}", why="the run was taken up before it")

    def _set_incomplete_aside(self) -> None:
        """Rename step directories without a manifest, so that no step's name is taken, and touch them no more."""
        for _, path in self.published():
            if not is_complete(path):
                self._set_aside(path, f"{path.name}.incomplete", why=f"it has no {MANIFEST}")

    def _set_aside(self, path: Path, name: str, *, why: str) -> None:
        target = self._free(name)
        self._move(path, target)
        logger.warning("%s: set aside as %s, since %s", path, target.name, why)

    def _throw_away(self, path: Path) -> None:
        path.rename(self._free(TRASH + path.name.removeprefix(OLD).removeprefix(TEMPORARY)))

    def _free(self, name: str) -> Path:
        """``name``, or the first of ``name-2``, ``name-3``, … that nothing has yet."""
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(path for name in names if not (path := self.root / name).exists())

    def _move(self, path: Path, target: Path) -> None:
        path.rename(target)

    def _trash(self) -> list[Path]:
        return list(self.root.glob(f"{TRASH}*"))

    def _delete(self, path: Path) -> None:
        shutil.rmtree(path)


class ObjectStore(CheckpointStore):
    """Checkpoints behind an fsspec URL, where a directory cannot be renamed: the manifest alone publishes.

    A save is written where it will stay, and begins with a mark there. A checkpoint that is thrown away first loses
    its manifest. There are no locks: only one run at a time may save to a URL.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        # They are recognised once, by their marks, and then listed here: a store may hide a manifest for a moment, and
        # a complete checkpoint must not look thrown away.
        self._thrown_away: list[Path] = []

    def temporary(self, step: int) -> Path:
        """Where it will stay."""
        return self.path(step)

    def published(self) -> list[tuple[int, Path]]:
        """As in other stores, listed anew: some file systems keep a listing that misses what was written since."""
        store: Any = self.root
        store.fs.invalidate_cache()
        return super().published()

    def recover(self) -> None:
        """Note for deletion what earlier saves left unfinished."""
        self._thrown_away += [p for _, p in self.published() if not is_complete(p) and (p / BEGUN).is_file()]

    def begin(self, step: int, *, after: int = 0) -> None:
        """Leave our mark in an empty ``temporary(step)``; complete checkpoints of later steps than `after` go first.

        It fails if something is there that no save of ours left.
        """
        self._set_superseded_aside(after)
        directory = self.path(step)
        if directory.exists() and any(directory.iterdir()):
            if not (directory / BEGUN).is_file():
                raise RunFailure(f"{directory}: holds files that no save left there; move them away")
            self._delete(directory)
        self._thrown_away = [path for path in self._thrown_away if path != directory]
        directory.mkdir(parents=True, exist_ok=True)
        (directory / BEGUN).write_text(f"step {step}\n")

    def abandon(self, step: int) -> None:
        """Delete what a failed save left, if it came so far as to leave its mark."""
        if (self.path(step) / BEGUN).is_file():
            self._delete(self.path(step))

    def publish(self, step: int, *, after: int) -> None:
        """Nothing is left to do: the manifest is there."""

    def _throw_away(self, path: Path) -> None:
        (path / MANIFEST).unlink()
        self._thrown_away.append(path)

    def _move(self, path: Path, target: Path) -> None:
        store: Any = path
        store.fs.copy(store.path, cast(Any, target).path, recursive=True)
        (path / MANIFEST).unlink()
        self._delete(path)

    def _trash(self) -> list[Path]:
        trash = self._thrown_away
        self._thrown_away = []
        return trash

    def _delete(self, path: Path) -> None:
        store: Any = path
        if store.exists():
            store.fs.rm(store.path, recursive=True)


def is_complete(checkpoint: Path) -> bool:
    """Whether a directory is a complete checkpoint of ours; says nothing of damage since."""
    return (checkpoint / MANIFEST).is_file()


@contextlib.contextmanager
def deletable(checkpoint: Path) -> Iterator[bool]:
    """Whether no process has the checkpoint in use (`in_use` in `manifest`); while this lasts, none begins to."""
    if is_remote(checkpoint):
        yield True
        return
    with (checkpoint / MANIFEST).open("r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # no locks on this file system
            pass
        yield True
