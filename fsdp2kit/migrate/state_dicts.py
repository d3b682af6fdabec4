"""From another trainer's saved weights to a checkpoint, one tensor at a time, on one process.

It reads a state dict written with `torch.save` (FSDP1's ``FULL_STATE_DICT``), or a directory written with
`torch.distributed.checkpoint` (FSDP1's ``SHARDED_STATE_DICT``, for one). Only tensors are unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsdp2kit.checkpoint.from_hf import model_of, write_weights
from fsdp2kit.checkpoint.keys import find_weights
from fsdp2kit.checkpoint.reader import SafeReader, StoredTensors
from fsdp2kit.errors import UserError
from fsdp2kit.weights.record import find_ties, weights_of
from fsdp2kit.weights.transfer import MappingReader, Reader, WeightEntry, transfer

_Value = TypeVar("_Value")

# What FSDP1, activation checkpointing and `torch.compile` add to the names of the modules within them.
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")
# Position tables: transformers before 4.31 kept them in state dicts; now it computes them.
_COMPUTED = ".rotary_emb.inv_freq"


def torch_to_dcp(
    source: str | Path, out: str | Path, *, config_dir: str | Path | None = None, trust_remote_code: bool = False
) -> str:
    """Write the weights of a state dict, or of a DCP directory, as a checkpoint for ``model.weights``.

    Names may have any prefix (``model.``, ``module.``, …), and the parts that FSDP1, activation checkpointing and
    `torch.compile` insert. Everything that is not a weight, such as an optimizer's state, is left out. Dtypes are
    kept. Otherwise it is like `hf_to_dcp`.

    Args:
        source: a file of `torch.save`, or a directory with a ``.metadata``.
        config_dir: a Hugging Face directory for config, tokenizer, …. Default: where the source lies.
        trust_remote_code: run the Python code that its config names.

    Returns:
        Which dtype was written, and why.

    Raises:
        UserError: the source is damaged, of another kind or of another model; there is no config; `out` exists; the
            source holds other parts than text of a model of several parts.
        RunFailure: `out` cannot be written.
    """
    source = Path(source)
    forms, reader = (_in_folder if source.is_dir() else _in_file)(source)
    stored = {_WRAPPERS.sub("", key): (key, form) for key, form in forms.items()}
    config_dir = Path(config_dir) if config_dir else _folder_with_config(source)
    model = model_of(config_dir, trust_remote_code=trust_remote_code)
    stored = weights_of(model).names.inner_keys(stored, source=source, others_from=config_dir)
    tied = find_ties(model)
    names = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    part = _part_of_model(source, stored, names)
    keys = find_weights(source, {key: form.shape for key, (_, form) in part.items()}, names, tied=tied)
    entries = []
    for name, key in keys.items():
        own, form = part[key]
        entries.append(WeightEntry({own: form}, {name: form}))
    return transfer(entries, reader, partial(write_weights, out=out, model=model, config_dir=config_dir))


def _in_folder(source: Path) -> tuple[dict[str, Tensor], Reader]:
    """Meta tensors by key, and a reader of the tensors."""
    reader = SafeReader(source)
    return reader.metas(), StoredTensors(reader)


def _in_file(source: Path) -> tuple[dict[str, Tensor], Reader]:
    """As `_in_folder`."""
    todo = "save the model's state dict alone, with torch.save"
    try:
        content = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file may raise nearly anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(str(source), f"cannot be read as a state dict of tensors ({reason})", todo) from error
    if not isinstance(content, Mapping):
        raise UserError(str(source), f"holds a {type(content).__name__} and no state dict", todo)
    tensors = dict(_flat(content))
    metas = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in tensors.items()}
    return metas, _Contiguous(tensors)


class _Contiguous(MappingReader):
    def read(self, name: str) -> Tensor:
        return super().read(name).contiguous()


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested mappings, by their keys joined with dots, as DCP has them."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def _part_of_model(source: Path, stored: Mapping[str, _Value], names: Mapping[str, object]) -> dict[str, _Value]:
    """The tensors under the prefix that fits most of the model's names (the shortest of several), without it."""
    if flat := next((key for key in stored if key.endswith("_flat_param")), None):
        what = f"holds {flat}, a rank's piece of many parameters at once"
        raise UserError(str(source), what, "save it as FULL_STATE_DICT or SHARDED_STATE_DICT")
    prefixes = {key.removesuffix(name) for name in names for key in stored if key.endswith(name)}
    explained = {one: sum(one + name in stored for name in names) for one in prefixes}
    prefix = min(prefixes, key=lambda one: (-explained[one], len(one), one), default="")
    part = {key.removeprefix(prefix): one for key, one in stored.items() if key.startswith(prefix)}
    return {key: one for key, one in part.items() if not key.startswith("optim") and not key.endswith(_COMPUTED)}


def _folder_with_config(source: Path) -> Path:
    for folder in [source, source / "hf", source.parent] if source.is_dir() else [source.parent]:
        if (folder / "config.json").is_file():
            return folder
    raise UserError(str(source), "has no config.json beside it", "give the model's directory as --config HF_DIR")
