"""The directory of a Hugging Face export: which of its files an export may replace, and how it comes and goes.

A store of one export, as `fsdp2kit.checkpoint.store` is one of checkpoints. The record, ``.fsdp2kit-export.json``,
names the checkpoint, its step, a digest of its manifest (and through it of every byte that was exported), the dtype,
and the files that the export wrote, with digests: only these, and only as they were written, may be replaced.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp2kit.checkpoint.export_plan import ExportPlan
from fsdp2kit.checkpoint.staging import OLD, PARTIAL, RECORD, clear_beside, make_beside, mark
from fsdp2kit.checkpoint.store import MANIFEST, is_complete
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.local import is_plain_name, read_json_object, replace_json, sha256, sync, sync_tree
from fsdp2kit.files.redaction import cleaned
from fsdp2kit.files.remote import check_writable, fill, is_remote
from fsdp2kit.job.distributed import agreement, gather_objects, rank
from fsdp2kit.weights.stored import weights_digest


@dataclass(eq=False)
class ExportDirectory:
    """An export on a disk, which is written beside its place and moved there whole, or on an object store.

    An object store has no renames. There the record, written last, is what completes an export.
    """

    path: Path
    _staging: Path | None = field(default=None, init=False, repr=False)

    @property
    def is_moved_there(self) -> bool:
        """Whether its files are written beside `place` and moved there; an object store has no renames."""
        return not is_remote(self.path)

    def check_writable(self, *, where: str) -> None:
        """Refuse a place beside which no file can be made. An object store is not touched before the export.

        Args:
            where: what the user would mend, e.g. a TOML key.
        """
        if self.is_moved_there:
            check_writable(self.path.parent, where=where)

    @property
    def staging(self) -> Path:
        """Where the files are written: beside `place`; on an object store, `path` itself. `begin` makes it."""
        if not self.is_moved_there:
            return self.path
        assert self._staging is not None, "`begin` comes first"
        return self._staging

    @property
    def place(self) -> Path:
        """The directory on a disk that `path` leads to, where that is a link."""
        return self.path.resolve() if self.path.is_symlink() else self.path.absolute()

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
        export = self.path.absolute()
        checkpoints = checkpoints.absolute()
        if export == checkpoints or export in checkpoints.parents or checkpoints in export.parents:
            what = f"{export} and the run's checkpoints in {checkpoints} lie in each other"
            raise UserError("checkpoint.export_dir", what, "choose another directory")

    def holds(self, checkpoint: Path, dtype: str, group: dist.ProcessGroup | None = None) -> bool:
        """Whether it is the whole export of a complete checkpoint, in a dtype. Collective.

        Args:
            group: of all ranks. Default: the default group.
        """
        # Rank 0's answer is everybody's: a file system may show the others an older state of the directory.
        found = False
        with agreement(group):
            if rank() == 0:
                digest = manifest_digest(checkpoint)
                record = self.record()
                is_of_it = digest is not None and (record.get("manifest"), record.get("dtype")) == (digest, dtype)
                found = is_of_it and self.is_whole()
        return bool(gather_objects(found, group=group)[0])

    def is_whole(self) -> bool:
        """Whether all files that an export of ours wrote are there, as we wrote them."""
        return all((self.path / name).is_file() for name in self._files()) and not self.changed()

    def changed(self) -> list[str]:
        """The files of our export that are there, and not as we wrote them."""
        digests = self.record().get("digests")
        if not self.is_moved_there or not isinstance(digests, dict):
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

    @contextlib.contextmanager
    def replaced(self, plan: ExportPlan, group: dist.ProcessGroup | None = None) -> Iterator[Path]:
        """The directory that a plan's files of weights are written into; then the export is published. Collective.

        After an error the unfinished files are deleted, and a former export stays.

        Args:
            group: of all ranks. Default: the default group.
        """
        is_first = rank() == 0
        try:
            with agreement(group):
                if is_first:
                    self.begin(plan)
            if self.is_moved_there:
                self._staging = gather_objects(self._staging, group=group)[0]
            yield self.staging
            with agreement(group):
                if is_first:
                    self.publish(plan)
        except BaseException:
            if is_first:
                self.abandon()
            raise
        finally:
            self._staging = None

    def begin(self, plan: ExportPlan) -> None:
        """Make `staging` empty; on an object store, take back the record of the export that is replaced.

        On one rank only, before any rank writes.
        """
        self.check_replaceable(read=plan.read)
        if not self.is_moved_there:
            self.path.mkdir(parents=True, exist_ok=True)
            # Not yet an export of anything, but all of it is ours and may be replaced.
            _write_record(self.path, {*plan.names(), *self._files()}, {})
            return
        clear_beside(self.place, PARTIAL)  # of exports that were cut short
        self._staging = make_beside(self.place, PARTIAL)
        mark(self._staging)

    def abandon(self) -> None:
        """Delete the unfinished files on a disk."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)

    def publish(self, plan: ExportPlan) -> None:
        """Add assets, index and record to the written files, and make them the export. On one rank only.

        Raises:
            RunFailure: a file of weights is not there, or not whole.
            UserError: something else than an export of ours is there now.
        """
        for name, file in plan.files.items():
            path = self.staging / name
            if not path.is_file() or path.stat().st_size != file.size:
                raise RunFailure(f"{path}: was not written, or not whole ({file.size} bytes are expected)")
        if not self.is_moved_there:
            self.check_replaceable()  # writing took a while
        files = {*plan.files, *fill(self.staging, plan.write_assets)} - {RECORD}
        facts = _facts(plan)
        if self.is_moved_there:
            self._move_there(files, facts)
            return
        for stale in self._files() - files:
            (self.path / stale).unlink(missing_ok=True)
        _write_record(self.path, files, facts)

    def _move_there(self, files: set[str], facts: dict[str, Any]) -> None:
        """Record what is in `staging`, and move that to its place."""
        digests = {name: _digest(self.staging / name) for name in sorted(files)}
        _write_record(self.staging, files, {**facts, "digests": digests})
        sync_tree(self.staging)
        self.check_replaceable()  # writing and flushing took a while
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
    """The digest of a file. A file of weights may have many gigabytes, so samples of each tensor are read."""
    return weights_digest(path) if path.suffix == ".safetensors" else sha256(path)


def manifest_digest(checkpoint: Path) -> str | None:
    """The digest of a checkpoint's manifest, which an export's record holds; None if the checkpoint is incomplete."""
    return sha256(checkpoint / MANIFEST) if is_complete(checkpoint) else None


def _facts(plan: ExportPlan) -> dict[str, Any]:
    """What the files of an export are made from."""
    checkpoint = plan.source.checkpoint if plan.source else None
    manifest = plan.source.manifest if plan.source else None
    facts = {
        "checkpoint": checkpoint and str(checkpoint),
        "step": manifest.step if manifest else None,
        "manifest": checkpoint and manifest_digest(checkpoint),
        "dtype": plan.dtype.name,
    }
    if plan.is_adapter and manifest:
        facts["base"] = manifest.identity.get("model.weights")  # by this an adapter recognises its model
    return cleaned(facts)


def _write_record(directory: Path, files: Iterable[str], facts: dict[str, Any]) -> None:
    replace_json(directory / RECORD, {**facts, "files": sorted(files)})
