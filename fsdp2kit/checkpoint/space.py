"""Room on the disk: whether a run's checkpoints fit, and how a failed save is reported."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp2kit.checkpoint.carried import carried_bytes
from fsdp2kit.checkpoint.reader import first_failure
from fsdp2kit.checkpoint.state import model_tensors
from fsdp2kit.checkpoint.store import CheckpointStore, is_remote
from fsdp2kit.config import TrainingConfig
from fsdp2kit.console import counted, size_text
from fsdp2kit.errors import RunFailure, StorageFailure, UserError, causes
from fsdp2kit.job.distributed import gather_objects, is_lost_rank
from fsdp2kit.optim.build import state_sizes

_CLIENTS = ("aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs", "adlfs")
"""Packages whose errors are failures of an object store."""
_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EFBIG}


def check_room(
    config: TrainingConfig,
    model: nn.Module,
    store: CheckpointStore,
    out: Path,
    *,
    export_dtype: torch.dtype,
    make_room: Callable[[], object],
) -> list[str]:
    """Refuse a disk without room for one checkpoint. On one rank; a URL is not checked.

    Args:
        model: of the global shapes, sharded or not.
        out: where the export goes.
        make_room: called before a warning or an error; it waits until what was thrown away is deleted.

    Returns:
        A warning for each disk on which what the run will keep does not fit.
    """
    section = config.checkpoint
    one, export = _sizes(config, model, export_dtype)
    export = 0 if section.export_hf == "never" else export  # an earlier one stays until this one is whole
    most = section.most_at_once(config.train.steps, keeps_best=config.eval.keeps_best)
    missing = max(1, most - len(store.complete()))
    on_disks = not is_remote(out) and not is_remote(store.root)
    beside = export > 0 and on_disks and store.root.stat().st_dev == out.parent.stat().st_dev
    needed = 0 if is_remote(store.root) else missing * one + (export if beside else 0)
    if needed and _free(store.root) < needed:
        make_room()
    warnings, free = [], _free(store.root) if needed else 0
    where = "checkpoint.dir" if section.dir else "run.dir"
    if free < min(one, needed):
        what = f"a checkpoint takes {size_text(one)}, and {store.root} has {size_text(free)} free"
        raise UserError(where, what, f"free space there, or choose another {where}")
    if free < needed:
        kept = f"{counted(missing, 'more checkpoint')} of {size_text(one)}"
        if beside:
            kept += f" and an export of {size_text(export)}"
        warnings.append(
            f"{where}: the disk may become full: {kept} may be written to {store.root}, "
            f"which has {size_text(free)} free; lower checkpoint.keep, or free space there"
        )
    if export and not beside and not is_remote(out) and (free := _free(out.parent)) < export:
        full = f"the export takes {size_text(export)}, and {out.parent} has {size_text(free)} free"
        warnings.append(f"checkpoint.export_dir: {full}; free space there")
    return warnings


def storage_failure(
    what: str, error: BaseException, disk: Path, todo: str, *, group: dist.ProcessGroup | None
) -> RunFailure:
    """The error of a save or an export that failed on every rank. Collective, before rank 0 frees its files.

    It is a `StorageFailure`, which needs no traceback, if on any rank the disk is full, or has refused access or
    failed, or if an object store's client raised it. Free space is looked at, because torch's writers do not say that
    a disk is full. Any other `OSError` of a disk, as of a missing file, may be a mistake in the code.
    """
    is_storages = False
    if not is_lost_rank(error):
        of_disk = any(_is_of(disk, cause) for cause in causes(error))
        with contextlib.suppress(RuntimeError):  # a rank is lost
            is_storages = any(gather_objects(is_full(disk) or of_disk, group=group))
    kind = StorageFailure if is_storages else RunFailure
    return kind(f"{what}: {first_failure(error)}{' (its disk is full)' if is_full(disk) else ''}; {todo}")


def _is_of(disk: Path, cause: BaseException) -> bool:
    """Whether an error is a disk's, or an object store's. Clients of stores also raise `OSError` without a file."""
    if isinstance(cause, OSError) and (cause.errno in _OF_DISKS or (is_remote(disk) and cause.filename is None)):
        return True
    return is_remote(disk) and type(cause).__module__.partition(".")[0] in _CLIENTS


def what_to_do(error: BaseException, store: CheckpointStore) -> str:
    """What the user should do after a save that failed, and where the run then goes on."""
    mend = f"free space there, or mend {store.root}, and start the run again"
    if is_remote(store.root):
        mend = "see that the store can be reached and written to, and start the run again"
    if is_lost_rank(error):
        mend = "see why a rank ended or did not answer (run.timeout_minutes), and start the run again"
    try:
        complete = store.complete()
    except Exception:  # what hindered the save may hinder this, too
        complete = []
    return f"{mend}: it resumes from {complete[-1][1].name}" if complete else mend


def is_full(directory: Path) -> bool:
    """Whether a disk has no room left."""
    try:
        return not is_remote(directory) and _free(directory) < 2**20
    except OSError:
        return False


def _sizes(config: TrainingConfig, model: nn.Module, export_dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a checkpoint, and of an export."""
    tensors = model_tensors(model).values()
    trained = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
    item_bytes = 0 if trained is None else trained.element_size()
    state = sum(state_sizes(config.optimizer, model, shards=1, item_bytes=item_bytes))
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return weights + state, sum(tensor.numel() for tensor in tensors) * export_dtype.itemsize + carried_bytes(model)


def _free(directory: Path) -> int:
    return shutil.disk_usage(directory).free
