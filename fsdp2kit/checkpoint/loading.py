"""From a distributed checkpoint into live tensors: every name, shape and dtype checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from fsdp2kit.checkpoint.contents import model_tensors
from fsdp2kit.checkpoint.files import in_use
from fsdp2kit.checkpoint.manifest import MANIFEST, check_contents, read_manifest
from fsdp2kit.checkpoint.safe_reader import SafeReader, load_tensors
from fsdp2kit.distributed import agreement, gather_objects
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import tied_names
from fsdp2kit.parallel.float8 import refresh_scales

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."


def check_together(path: Path) -> None:
    """Check every byte of a checkpoint against its manifest, each rank its share of the files. Collective.

    Raises:
        UserError: it is incomplete or damaged; the error, the same on every rank, names the file.
    """
    with agreement():
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        check_contents(path, read_manifest(path), rank=rank, world_size=size)


def load_all(path: Path, wanted: Mapping[str, Tensor]) -> None:
    """Fill `wanted`, in place, from a checkpoint that holds exactly these tensors; collective.

    Raises:
        UserError: a tensor is missing, left over, or of another shape or dtype; the error names it.
        RunFailure: a file cannot be read.
    """
    with agreement():
        reader = SafeReader(path)
        stored = reader.stored_tensors()
        _check_same_trained(path, wanted=set(wanted), stored=set(stored))
        check_same_names(path, wanted=set(wanted), stored=set(stored))
        for key, tensor in wanted.items():
            check_shape(path, key, tuple(stored[key].size), tuple(tensor.shape))
            if stored[key].properties.dtype != tensor.dtype:
                raise UserError(
                    f"{path}: {key}",
                    f"is {stored[key].properties.dtype} in the checkpoint and {tensor.dtype} in the run",
                    "set fsdp.storage_dtype, fsdp.ignored_modules and (for those) fsdp.param_dtype "
                    f"as they were when that was saved, or {_start_anew(path)}",
                )
    load_tensors(reader, wanted)


def _check_same_trained(path: Path, *, wanted: set[str], stored: set[str]) -> None:
    """Check that the same parameters of the same model have optimizer state.

    Raises:
        UserError: naming the first tensor, in alphabetic order, that is on one side only.
    """
    differing = sorted(wanted ^ stored)
    if not differing or not all(key.startswith(OPTIMIZER_PREFIX) for key in differing):
        return
    first = differing[0]
    where = "the checkpoint and not in this run" if first in stored else "this run and not in the checkpoint"
    parameter = first.partition(".exp_avg")[0]
    if all(any(key.startswith(f"{parameter}.exp_avg") for key in keys) for keys in (wanted, stored)):
        raise UserError(
            str(path),
            f"{first} is in {where}: moments are stored in another format ({len(differing)} such tensors in all)",
            "with adamw_8bit it depends on which ranks have rows of a parameter: resume on as many ranks as then, or "
            f"{_start_anew(path)}",
        )
    raise UserError(
        str(path),
        f"{first} is in {where}: they train different parameters ({len(differing)} such tensors in all)",
        f"set model.freeze as it was when that was saved, or {_start_anew(path)}",
    )


def _start_anew(path: Path) -> str:
    return f"choose another run.dir and start from the weights alone with model.weights = '{path}'"


def load_weights(path: Path, model: nn.Module) -> None:
    """Fill a model's parameters and persistent buffers from a distributed checkpoint, and read no more. Collective.

    The checkpoint is ours, or plain DCP of a Hugging Face state dict, with or without a ``model.`` before its names.
    Values are cast to the model's dtypes. A tied parameter may be stored under any of its names. Where there is a
    manifest, every byte is first checked against it.

    Raises:
        UserError: this is no checkpoint, it is damaged, or a tensor is missing, left over, or of another shape; the
            error names the file or the tensor.
        RunFailure: a file cannot be read.
    """
    with in_use(path / MANIFEST):
        if any(gather_objects((path / MANIFEST).is_file())):
            check_together(path)
        tensors = model_tensors(model)
        with agreement():
            reader = SafeReader(path)
            stored = reader.stored_tensors()
            keys = find_weights(path, set(stored), names=tensors, tied=tied_names(model))
            for name, tensor in tensors.items():
                check_shape(path, keys[name], tuple(stored[keys[name]].size), tuple(tensor.shape))
        load_tensors(reader, {keys[name]: tensor for name, tensor in tensors.items()})
    refresh_scales(model)


def find_weights(
    path: Path, stored: set[str], *, names: Mapping[str, object], tied: Mapping[str, str]
) -> dict[str, str]:
    """The checkpoint's key of every name in `names`, whether or not the keys carry a ``model.`` prefix.

    Args:
        stored: the keys of all tensors in the checkpoint.
        names: the model's names, a tied parameter under the first of its own.
        tied: every further name of a tied parameter → its first name.

    Raises:
        UserError: a name has no key, or a key of the model's part has no name.
    """
    # Hugging Face names may begin with "model." themselves, so the prefix is told by how many names it explains.
    prefix = max((MODEL_PREFIX, ""), key=lambda candidate: sum(candidate + name in stored for name in names))
    keys = {name: prefix + name for name in names}
    for alias, name in tied.items():
        if keys[name] not in stored and prefix + alias in stored:
            keys[name] = prefix + alias
    wanted = set(keys.values())
    spare = {prefix + alias for alias in tied} - wanted
    part = {key for key in stored if key.startswith(prefix) and (prefix or not key.startswith(OPTIMIZER_PREFIX))}
    check_same_names(path, wanted=wanted, stored=part - spare)
    return keys


def check_same_names(path: Path, *, wanted: set[str], stored: set[str]) -> None:
    """Check that a checkpoint, or a part of one, holds the tensors that the model has, no more and no fewer.

    Raises:
        UserError: naming the first tensor, in alphabetic order, that is on one side only.
    """
    todo = "give a checkpoint of this model, or the model.path and model.config that the checkpoint was made with"
    if missing := sorted(wanted - stored):
        raise UserError(str(path), f"has no tensor {missing[0]} ({len(missing)} missing in all)", todo)
    if unexpected := sorted(stored - wanted):
        what = f"holds {unexpected[0]}, which the model has not ({len(unexpected)} such tensors in all)"
        raise UserError(str(path), what, todo)


def check_shape(path: Path, key: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Check a stored tensor's global shape.

    Raises:
        UserError: it is another one.
    """
    if stored != shape:
        raise UserError(
            f"{path}: {key}",
            f"has shape {stored} in the checkpoint and {shape} in the model",
            "give a checkpoint of this model, or the model.path and model.config that the checkpoint was made with",
        )
