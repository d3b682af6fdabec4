"""Room on the disk: whether a run's checkpoints fit, and how a failed save is reported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp2kit.checkpoint.reader import first_failure
from fsdp2kit.checkpoint.state import model_tensors
from fsdp2kit.checkpoint.store import CheckpointStore
from fsdp2kit.config import TrainingConfig
from fsdp2kit.console import counted, size_text
from fsdp2kit.errors import RunFailure, StorageFailure, UserError, causes
from fsdp2kit.files.remote import free_bytes, how_to_mend, is_storage_error, on_one_disk
from fsdp2kit.job.distributed import gather_objects, is_lost_rank
from fsdp2kit.optim.build import state_sizes
from fsdp2kit.weights.parts import parts_bytes


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
    beside = export > 0 and on_one_disk(store.root, out.parent)
    needed = missing * one + (export if beside else 0)
    free = free_bytes(store.root)
    if free is not None and free < needed:
        make_room()
        free = free_bytes(store.root)
    warnings = []
    where = "checkpoint.dir" if section.dir else "run.dir"
    if free is not None and free < min(one, needed):
        what = f"a checkpoint takes {size_text(one)}, and {store.root} has {size_text(free)} free"
        raise UserError(where, what, f"free space there, or choose another {where}")
    if free is not None and free < needed:
        kept = f"{counted(missing, 'more checkpoint')} of {size_text(one)}"
        if beside:
            kept += f" and an export of {size_text(export)}"
        warnings.append(
            f"{where}: the disk may become full: {kept} may be written to {store.root}, "
            f"which has {size_text(free)} free; lower checkpoint.keep, or free space there"
        )
    if export and not beside:
        free_there = free_bytes(out.parent)
        if free_there is not None and free_there < export:
            full = f"the export takes {size_text(export)}, and {out.parent} has {size_text(free_there)} free"
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
        of_disk = any(is_storage_error(cause, disk) for cause in causes(error))
        with contextlib.suppress(RuntimeError):  # a rank is lost
            is_storages = any(gather_objects(is_full(disk) or of_disk, group=group))
    kind = StorageFailure if is_storages else RunFailure
    return kind(f"{what}: {first_failure(error)}{' (its disk is full)' if is_full(disk) else ''}; {todo}")


def what_to_do(error: BaseException, store: CheckpointStore) -> str:
    """What the user should do after a save that failed, and where the run then goes on."""
    mend = f"{how_to_mend(store.root)}, and start the run again"
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
        free = free_bytes(directory)
    except OSError:
        return False
    return free is not None and free < 2**20


def _sizes(config: TrainingConfig, model: nn.Module, export_dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a checkpoint, and of an export."""
    tensors = model_tensors(model).values()
    trained = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
    item_bytes = 0 if trained is None else trained.element_size()
    state = sum(state_sizes(config.optimizer, model, shards=1, item_bytes=item_bytes))
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return weights + state, sum(tensor.numel() for tensor in tensors) * export_dtype.itemsize + parts_bytes(model)
