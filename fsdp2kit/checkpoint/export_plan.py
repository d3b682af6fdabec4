"""What a Hugging Face export holds: the files of weights, and what is beside them. Nothing is written here but assets.

`plan_export` decides for a checkpoint; `fsdp2kit.checkpoint.merge` for an adapter that is merged into its model, and
`fsdp2kit.checkpoint.export_model` for a model in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.keys import stored_weights
from fsdp2kit.checkpoint.reader import StoredTensors
from fsdp2kit.checkpoint.source import CheckpointSource
from fsdp2kit.console import TRUST_CODE
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import read_json_object, replace_file, replace_json
from fsdp2kit.model.adapters import names_experts
from fsdp2kit.model.assets import copy_assets
from fsdp2kit.model.code_files import code_files
from fsdp2kit.model.config_file import config_text, dtype_of, with_dtype
from fsdp2kit.weights.adapters import CONFIG_NAME as ADAPTER_CONFIG
from fsdp2kit.weights.adapters import WEIGHTS_NAME as ADAPTER_WEIGHTS
from fsdp2kit.weights.entries import adapter_entries, entries
from fsdp2kit.weights.parts import find_parts
from fsdp2kit.weights.record import weights_of
from fsdp2kit.weights.safetensors_file import file_size
from fsdp2kit.weights.stored import INDEX_NAME
from fsdp2kit.weights.transfer import Reader, WeightEntry, forms_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportDtype:
    """The dtype of an export's floating-point tensors; some stay in another (`ExportPlan.describe_dtype`)."""

    name: str
    """One of `DTYPES`."""
    reason: str = "as asked for"
    """Who chose it, as the end of a sentence that names it."""

    @property
    def torch(self) -> torch.dtype:
        """As torch has it."""
        return DTYPES[self.name]


def choose_dtype(asked: str | None, named: Iterable[tuple[str | None, str]]) -> ExportDtype:
    """The dtype that is asked for, else the first of ``named`` that is given.

    Args:
        named: dtypes by name, each with the reason to take it; the next is read only if this one is None.

    Raises:
        UserError: no export has this dtype.
    """
    for name, reason in itertools.chain([(asked, ExportDtype.reason)], named):
        if name is not None:
            if name not in DTYPES:
                raise UserError("dtype", f"{name!r} is not a dtype for exports", f"use one of {', '.join(DTYPES)}")
            return ExportDtype(name, reason)
    raise AssertionError("`named` ends in a dtype")


class ExportFile:
    """A file of weights.

    Args:
        entries: what goes into it, in the order of its bytes.
    """

    def __init__(self, entries: Sequence[WeightEntry]) -> None:
        self.entries = entries
        self.forms: dict[str, Tensor] = forms_of(entries)
        """Meta tensors by their names in the file, in the order of their bytes."""
        self.size = file_size(self.forms)
        """Bytes of the file."""


@dataclass(frozen=True, eq=False)
class ExportPlan:
    """What an export will write; the same on every rank."""

    config_dir: Path
    """Where config, tokenizer, … are copied from."""
    dtype: ExportDtype
    files: dict[str, ExportFile]
    """Of weights, by name."""
    source: CheckpointSource | None = None
    """What is exported; None: a model in memory, by `fsdp2kit.checkpoint.export_model`."""
    model: PreTrainedModel | None = None
    """Without values; None for one that transformers does not know itself, and for an adapter."""
    is_adapter: bool = False
    """Whether an adapter is exported, without the model that it belongs to."""
    reader: Callable[[], contextlib.AbstractContextManager[Reader]] | None = None
    """Opens what the tensors are read from; None: a model in memory."""
    read: Sequence[Path | None] = ()
    """Directories that are read, which the export must not replace."""

    def describe_dtype(self) -> str:
        """Which dtype is written, and why; tensors that have another one."""
        forms = [form for file in self.files.values() for form in file.forms.values() if form.is_floating_point()]
        others = Counter(str(form.dtype).removeprefix("torch.") for form in forms if form.dtype != self.dtype.torch)
        kept = "".join(f"; {count} tensors stay in {dtype}" for dtype, count in sorted(others.items()))
        return f"{self.dtype.name}, {self.dtype.reason}{kept}"

    def names(self) -> set[str]:
        """Of every file that may be written."""
        assets = {path.relative_to(self.config_dir).as_posix() for path in self.config_dir.rglob("*")}
        return {*self.files, INDEX_NAME, *assets}

    def write_assets(self, folder: Path) -> None:
        """Write config, tokenizer, …; the config names the weights' dtype. Add an index if there are several files."""
        copy_assets(self.config_dir, folder)
        path = folder / "config.json"
        if self.is_adapter:  # as peft writes it: the model's own config would pass it off as a model
            code, _ = code_files(folder)
            kept, _ = code_files(folder, ("tokenizer_config.json",))
            for module in (one for one in code if one not in kept):
                (folder / module).unlink()
            path.unlink(missing_ok=True)
            shutil.copyfile(self.config_dir / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)
            return
        config = read_json_object(path)
        changed = config
        is_part = self.model is not None and weights_of(self.model).names.whole is not None
        if dtype_of(config) != self.dtype.name:
            changed = with_dtype(config, self.dtype.name, is_whole=is_part)
        if self.model is not None and not is_part and not config.get("architectures"):
            changed = {**changed, "architectures": [type(self.model).__name__]}  # configs made in code have none
        if changed != config:
            replace_file(path, config_text(changed))
        if len(self.files) > 1:
            weight_map = {name: file for file in self.files for name in self.files[file].forms}
            total = sum(entry.nbytes for file in self.files.values() for entry in file.entries)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            replace_json(folder / INDEX_NAME, index)


def plan_export(
    source: CheckpointSource,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    parts_dir: Path | None = None,
) -> ExportPlan:
    """Decide what goes into which file; see `fsdp2kit.checkpoint.hf.dcp_to_hf`. Reads metadata only."""
    manifest = source.manifest
    named = manifest.export_dtype if manifest else None
    chosen = choose_dtype(
        dtype,
        [
            (named, "which the checkpoint names for its exports"),
            ("float32", "since the checkpoint names no dtype for its exports"),
        ],
    )
    model = None if source.is_adapter else source.model
    parts = None
    if not source.is_adapter:
        if model is None and manifest is None:
            what = "the model runs code of its own, so its tensors cannot be told from others in the checkpoint"
            raise UserError(str(source.config_dir), what, TRUST_CODE)
        parts = find_parts(model, source.checkpoint, source.environment, parts_dir or source.config_dir)
    keys, tensors = stored_weights(source.reader, model)
    if source.is_adapter:
        one_by_one = source.model is not None and names_experts(source.model, source.config_dir)
        found = adapter_entries(source.model, tensors, chosen.torch, one_by_one=one_by_one)
    else:
        kept = manifest.in_float32(chosen.name) if manifest else ()
        found = entries(model, tensors, chosen.torch, kept=kept, parts=parts)
    files = {ADAPTER_WEIGHTS: ExportFile(found)} if source.is_adapter else into_files(found, max_shard_bytes)
    return ExportPlan(
        source.config_dir,
        chosen,
        files,
        source,
        model,
        is_adapter=source.is_adapter,
        reader=partial(contextlib.nullcontext, StoredTensors(source.reader, keys)),
        read=[parts],
    )


def into_files(entries: Sequence[WeightEntry], max_shard_bytes: int) -> dict[str, ExportFile]:
    """What goes into which file of a model's export: files are filled in order, and have transformers' names.

    Args:
        max_shard_bytes: of a file; a larger entry gets its own.
    """
    split = split_state_dict_into_shards_factory(
        {str(number): entry for number, entry in enumerate(entries)},
        get_storage_size=lambda entry: entry.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    files = {name: [entries[int(number)] for number in numbers] for name, numbers in split.filename_to_tensors.items()}
    for file in files.values():  # wider dtypes first, so that each tensor is aligned
        file.sort(key=lambda entry: -max(form.itemsize for form in entry.forms.values()))
    return {name: ExportFile(file) for name, file in files.items()}
