"""The directory of a Hugging Face export: which of its files an export may replace, and how it comes and goes.

A store of one export, as `fsdp2kit.checkpoint.store` is one of checkpoints. The record, ``.fsdp2kit-export.json``,
names the checkpoint, its step, a digest of its manifest (and through it of every byte that was exported), the dtype,
and the files that the export wrote, with digests: only these, and only as they were written, may be replaced.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp2kit.checkpoint.staging import OLD, PARTIAL, RECORD, clear_beside, make_beside, mark
from fsdp2kit.checkpoint.store import is_remote
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import is_plain_name, read_json_object, replace_file, sha256, sync, sync_tree
from fsdp2kit.model.assets import weights_digest


@dataclass(eq=False)
class ExportDirectory:
    """An export on a disk, which is written beside its place and moved there whole, or on an object store.

    An object store has no renames. There the record, written last, is what completes an export.
    """

    path: Path
    _staging: Path | None = field(default=None, init=False, repr=False)

    @property
    def staging(self) -> Path:
        """Where the files are written: beside `place`; on an object store, `path` itself. `begin` makes it."""
        if is_remote(self.path):
            return self.path
        assert self._staging is not None, "`begin` or `join` comes first"
        return self._staging

    def join(self, staging: Path) -> None:
        """Take the directory that another rank's `begin` made for this export's."""
        self._staging = staging

    @property
    def place(self) -> Path:
        """The directory on a disk that `path` leads to, where that is a link."""
        return self.path.resolve() if self.path.is_symlink() else self.path

    def check_replaceable(self, *, read: Iterable[Path | None] = ()) -> None:
        """Check that it is absent, empty, or holds nothing but an earlier export of ours, and is none of ``read``."""
        if not self.path.exists():
            return
        todo = "choose another directory, or move that away"
        if any(path is not None and path.resolve() == self.path.resolve() for path in read):
            what = "is read here, and the export would replace it"
            raise UserError(str(self.path), what, "choose another directory")
        if not self.path.is_dir():
            raise UserError(str(self.path), "is not a directory", todo)
        present = {path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if not path.is_dir()}
        if others := sorted(present - {RECORD} - self._files()):
            raise UserError(str(self.path), f"holds {others[0]}, which no export of fsdp2kit wrote there", todo)
        if changed := self.changed():
            raise UserError(str(self.path), f"{changed[0]} is not as fsdp2kit wrote it there", todo)

    def check_apart(self, checkpoints: Path) -> None:
        """Refuse an export among checkpoints, or around them: it replaces its directory as a whole."""
        export, checkpoints = self.path.absolute(), checkpoints.absolute()
        if export == checkpoints or export in checkpoints.parents or checkpoints in export.parents:
            what = f"{export} and the run's checkpoints in {checkpoints} lie in each other"
            raise UserError("checkpoint.export_dir", what, "choose another directory")

    def is_whole(self) -> bool:
        """Whether all files that an export of ours wrote are there, as we wrote them."""
        return all((self.path / name).is_file() for name in self._files()) and not self.changed()

    def changed(self) -> list[str]:
        """The files of our export that are there, and not as we wrote them."""
        digests = self.record().get("digests")
        if is_remote(self.path) or not isinstance(digests, dict):
            return []
        present = {name: self.path / name for name in filter(is_plain_name, digests) if (self.path / name).is_file()}
        return sorted(name for name, path in present.items() if _digest(path) != digests[name])

    def record(self) -> dict[str, Any]:
        """The record of the export that is there; empty where there is none that can be read."""
        try:
            record = read_json_object(self.path / RECORD)
        except (OSError, ValueError):
            return {}
        return record if isinstance(record.get("files"), list) else {}

    def begin(self, files: Iterable[str]) -> None:
        """Make `staging` empty; on an object store, take back the record of the export that is replaced.

        On one rank only, before any rank writes.

        Args:
            files: what the export is going to write.
        """
        if is_remote(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # Not yet an export of anything, but all of it is ours and may be replaced.
            _write_record(self.path, {*files, *self._files()}, {})
            return
        clear_beside(self.place, PARTIAL)  # of exports that were cut short
        self._staging = make_beside(self.place, PARTIAL)
        mark(self._staging)

    def abandon(self) -> None:
        """Delete the unfinished files on a disk."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)

    def publish(self, files: set[str], facts: dict[str, Any]) -> None:
        """Record what was written to `staging`, and make it the export. On one rank only, once all have written.

        Args:
            files: what was written.
            facts: what the files were made from.
        """
        if is_remote(self.path):
            for stale in self._files() - files:
                (self.path / stale).unlink(missing_ok=True)
            _write_record(self.path, files, facts)
            return
        files = files - {RECORD}  # which `begin` wrote
        digests = {name: _digest(self.staging / name) for name in sorted(files)}
        _write_record(self.staging, files, {**facts, "digests": digests})
        sync_tree(self.staging)
        self.check_replaceable()  # flushing took a while
        place = self.place
        old = make_beside(place, OLD) if place.exists() else None
        if old is not None:
            place.rename(old)
        try:
            self.staging.rename(place)
        except OSError:  # somebody made a directory there meanwhile
            if old is not None and not place.exists():
                old.rename(place)
            raise
        sync(place.parent)
        clear_beside(place, OLD)

    def upload(self, repository: str) -> str:
        """Upload the export to a repository of the Hugging Face hub, which is made, private, if there is none.

        Returns:
            A line that says where it is, or why it is not there: an outage is no failure of the run.
        """
        from huggingface_hub import HfApi

        try:
            found = HfApi().create_repo(repository, private=True, exist_ok=True)
            HfApi().upload_folder(repo_id=found.repo_id, folder_path=self.path, ignore_patterns=[RECORD])
        except Exception as error:  # the hub client raises errors of many kinds
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            later = f"`hf upload {repository} {self.path}` uploads it later"
            return f"checkpoint.push_to_hub: {repository}: not uploaded ({reason}); {later}"
        return f"uploaded to {found}"

    def _files(self) -> set[str]:
        """The files that exports of ours wrote there, or were about to; names that lead out of it are left out."""
        return set(filter(is_plain_name, self.record().get("files", [])))


def _digest(path: Path) -> str:
    """Of a file of weights, samples of each tensor are read: it may have many gigabytes."""
    return weights_digest(path) if path.suffix == ".safetensors" else sha256(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file by a JSON object."""
    replace_file(path, json.dumps(value, indent=2) + "\n")


def _write_record(directory: Path, files: Iterable[str], facts: dict[str, Any]) -> None:
    write_json(directory / RECORD, {**facts, "files": sorted(files)})
