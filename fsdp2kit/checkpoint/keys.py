"""Which tensor of a checkpoint is which tensor of a model; a checkpoint that does not fit is refused here.

On disk the tensors' keys are ``model.<name>`` and ``optimizer.state.<name>.<field>``, with Hugging Face names, so that
plain `torch.distributed.checkpoint` can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.reader import SafeReader
from fsdp2kit.errors import UserError
from fsdp2kit.weights.record import find_ties

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
_SAME_MODEL = "give a checkpoint of this model, or the model.path and model.config that the checkpoint was made with"


def stored_weights(reader: SafeReader, model: PreTrainedModel | None) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Of every tensor of the model, by name and in its order: its key in the checkpoint, and a meta tensor like it.

    Args:
        model: None: the names are those of the keys.
    """
    metas = reader.metas()
    if model is None:
        keys = {key.removeprefix(MODEL_PREFIX): key for key in metas if key.startswith(MODEL_PREFIX)}
    else:
        tied = find_ties(model)
        expected = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        keys = find_weights(reader.directory, {key: meta.shape for key, meta in metas.items()}, expected, tied=tied)
    return keys, {name: metas[key] for name, key in keys.items()}


def find_weights(
    path: Path,
    stored: Mapping[str, torch.Size],
    tensors: Mapping[str, Tensor],
    *,
    tied: Mapping[str, str],
    smaller: Mapping[str, torch.Size] | None = None,
) -> dict[str, str]:
    """The checkpoint's key of every name in `tensors`, whether or not the keys carry a ``model.`` prefix.

    Args:
        stored: the shapes of all tensors in the checkpoint, by key.
        tensors: the model's, by name, a tied parameter under the first of its own.
        tied: every further name of a tied parameter → its first name.
        smaller: the shapes that tensors may have in the checkpoint in place of the model's, by name.
    """
    # Hugging Face names may begin with "model." themselves, so the prefix is told by how many names it explains.
    prefix = max((MODEL_PREFIX, ""), key=lambda candidate: sum(candidate + name in stored for name in tensors))
    keys = {name: prefix + name for name in tensors}
    for alias, name in tied.items():
        if keys[name] not in stored and prefix + alias in stored:
            keys[name] = prefix + alias
    wanted = set(keys.values())
    spare = {prefix + alias for alias in tied} - wanted
    part = {key for key in stored if key.startswith(prefix) and (prefix or not key.startswith(OPTIMIZER_PREFIX))}
    check_same_names(path, wanted=wanted, stored=part - spare)
    for name, tensor in tensors.items():
        if stored[keys[name]] != (smaller or {}).get(name):
            check_shape(path, keys[name], stored[keys[name]], tensor.shape)
    return keys


def check_shape(path: Path, key: str, stored: torch.Size, shape: torch.Size) -> None:
    """Raise a `UserError` where a tensor's shape in a checkpoint is not the model's."""
    if stored != shape:
        what = f"has shape {tuple(stored)} in the checkpoint and {tuple(shape)} in the model"
        raise UserError(f"{path}: {key}", what, _SAME_MODEL)


def check_same_names(path: Path, *, wanted: set[str], stored: set[str]) -> None:
    """Raise a `UserError` that names the first tensor, in alphabetic order, that is on one side only."""
    if missing := sorted(wanted - stored):
        raise UserError(str(path), f"has no tensor {missing[0]} ({len(missing)} missing in all)", _SAME_MODEL)
    if unexpected := sorted(stored - wanted):
        what = f"holds {unexpected[0]}, which the model has not ({len(unexpected)} such tensors in all)"
        raise UserError(str(path), what, _SAME_MODEL)


def check_same_state(path: Path, *, wanted: set[str], stored: set[str]) -> None:
    """Raise a `UserError` that says what changed where all that differs is the optimizer's state."""
    differing = sorted(wanted ^ stored)
    if not differing or not all(key.startswith(OPTIMIZER_PREFIX) for key in differing):
        return
    before = _fields(stored)
    now = _fields(wanted)
    changed = next((name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]), None)
    todo = "use the optimizer that it was saved with, or "
    if not before or not now:
        what = "the other keeps no optimizer state at all"
    elif changed is None:
        what = "they train different parameters"
        todo = "set model.freeze as it was when that was saved, or "
    elif len({frozenset(field.partition(".")[0] for field in fields[changed]) for fields in (before, now)}) == 1:
        what = "moments are stored in another format"
        todo = "with adamw_8bit it depends on which ranks have rows of a parameter: resume on as many as then, or "
    else:
        kept = " and ".join(", ".join(sorted(fields[changed])) for fields in (before, now))
        what = f"their optimizers differ, which keep {kept} of {changed}"
    where = "the checkpoint and not in this run" if differing[0] in stored else "this run and not in the checkpoint"
    what = f"{differing[0]} is in {where}: {what} ({len(differing)} such tensors in all)"
    raise UserError(str(path), what, todo + start_anew(path))


def _fields(keys: set[str]) -> dict[str, set[str]]:
    """What an optimizer keeps of each parameter, e.g. ``{"lm_head.weight": {"step", "exp_avg", "exp_avg_sq"}}``."""
    names = {key.removeprefix(MODEL_PREFIX) for key in keys if key.startswith(MODEL_PREFIX)}
    fields: dict[str, set[str]] = {}
    for key in (key.removeprefix(f"{OPTIMIZER_PREFIX}state.") for key in keys if key.startswith(OPTIMIZER_PREFIX)):
        name = key
        while name and name not in names:
            name = name.rpartition(".")[0]
        fields.setdefault(name, set()).add(key[len(name) + 1 :])
    return fields


def start_anew(path: Path) -> str:
    """What to do about a checkpoint that a run cannot resume from."""
    return f"choose another run.dir and start from the weights alone with model.weights = '{path}'"
