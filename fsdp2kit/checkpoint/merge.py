"""A checkpoint's adapter merged into the model that it was trained on, as a Hugging Face directory.

What is written is read a tensor at a time, from the checkpoint and from the safetensors of that model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.adapter import base_of
from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.export_plan import MAX_SHARD_BYTES, ExportPlan, choose_dtype, into_files
from fsdp2kit.checkpoint.hf import write_export
from fsdp2kit.checkpoint.keys import MODEL_PREFIX
from fsdp2kit.checkpoint.reader import StoredTensors
from fsdp2kit.checkpoint.source import CheckpointSource, open_source
from fsdp2kit.console import TRUST_CODE
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import read_json_object
from fsdp2kit.files.remote import to_path
from fsdp2kit.model.adapters import inject, read_adapter_config
from fsdp2kit.model.assets import find_hf_dir
from fsdp2kit.model.build import model_on_meta
from fsdp2kit.model.config_file import dtype_of
from fsdp2kit.weights.adapters import ADAPTER, base_name, merge_experts, merged_weight
from fsdp2kit.weights.entries import entries
from fsdp2kit.weights.experts import UP
from fsdp2kit.weights.load import open_pretrained
from fsdp2kit.weights.parts import find_parts, usual_dtype_of
from fsdp2kit.weights.record import weights_of
from fsdp2kit.weights.stored import weights_digest
from fsdp2kit.weights.transfer import Reader, converted, forms_of


def merge_to_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config_dir: str | Path | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Write the model that a checkpoint's adapter was trained on, with the adapter merged into it. In one process.

    Args:
        checkpoint, out, max_shard_bytes, config_dir, trust_remote_code: as for `fsdp2kit.checkpoint.hf.dcp_to_hf`.
        dtype: the same. Default: what the model's config names, else the usual one of its files.
        base: where the model is now. Default: where it was.

    Returns:
        Which dtype was written, and why.

    Raises:
        UserError: the checkpoint holds no adapter, or the model is another one; else as `dcp_to_hf`.
    """
    directory = ExportDirectory(to_path(out).absolute())
    checkpoint = to_path(checkpoint)
    config_dir = to_path(config_dir) if config_dir else None
    with open_source(checkpoint, config_dir, trust_remote_code=trust_remote_code) as source:
        plan = plan_merge(source, dtype=dtype, max_shard_bytes=max_shard_bytes, base=base)
        write_export(plan, directory)
    return plan.describe_dtype()


def plan_merge(
    source: CheckpointSource,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    base: str | None = None,
) -> ExportPlan:
    """Decide what goes into which file; see `merge_to_hf`. Reads metadata only, and writes nothing."""
    config_dir = source.config_dir
    if not source.is_adapter:
        raise UserError("--merge", f"{source.checkpoint} holds a whole model, and no adapter", "leave it out")
    base_dir = _find_base(source, base)
    model = source.model
    if model is None:
        what = "the model runs code of its own, so the adapter cannot be put into it here"
        raise UserError(str(config_dir), what, TRUST_CODE)
    parts = find_parts(model, source.checkpoint, source.environment, base_dir)
    chosen = choose_dtype(dtype, _dtypes_of_base(config_dir, base_dir, model, parts))
    with open_pretrained(model, base_dir, allow_unexpected=True, grow=True) as (found, _):
        metas = forms_of(found)
    tensors = {name: metas[name] for name in model.state_dict() if name in metas}
    return ExportPlan(
        config_dir,
        chosen,
        into_files(entries(model, tensors, chosen.torch, parts=parts), max_shard_bytes),
        source,
        model,
        reader=partial(_open_merged, source, model, base_dir),
        read=[base_dir, parts],
    )


def _dtypes_of_base(
    config_dir: Path, base_dir: Path, model: PreTrainedModel, parts: Path | None
) -> Iterator[tuple[str | None, str]]:
    """The dtypes of the model that the adapter was trained on, each with the reason to take it."""
    yield (
        dtype_of(read_json_object(config_dir / "config.json")),
        "which the config of the model that the adapter was trained on names",
    )
    yield usual_dtype_of(model, parts or base_dir), f"in which {base_dir} has most weights"


def _find_base(source: CheckpointSource, base: str | None) -> Path:
    """The directory of the model that a checkpoint's adapter was trained on.

    Args:
        base: where it is now; None: where it was.
    """
    name = base_of(source.config_dir)
    if base is None and not name:
        raise UserError("--merge", "the adapter's config names no model", "give its directory: --merge DIR")
    found = find_hf_dir(str(base or name), key="--merge", with_weights=True)
    trained_on = source.manifest.identity.get("model.weights") if source.manifest else None
    if trained_on is not None and trained_on != f"pretrained {weights_digest(found)}":
        what = f"{found} holds other weights than the adapter was trained on ({name})"
        raise UserError("--merge", what, "give the directory of that model: --merge DIR")
    return found


@contextlib.contextmanager
def _open_merged(source: CheckpointSource, model: PreTrainedModel, base_dir: Path) -> Iterator[MergedTensors]:
    reader = source.reader
    keys = {key.removeprefix(MODEL_PREFIX): key for key in reader.stored_tensors() if key.startswith(MODEL_PREFIX)}
    adapted: Any = model_on_meta(source.config_dir, trust_remote_code=source.trusts_code)
    inject(adapted, read_adapter_config(source.config_dir, "--merge"))
    with (
        open_pretrained(model, base_dir, allow_unexpected=True, grow=True) as (found, files),
        converted(found, files) as base,
    ):
        yield MergedTensors(adapted, base, StoredTensors(reader, keys), keys)


class MergedTensors(Reader):
    """The tensors of ``base``, with an adapter merged into them; each is made when it is read.

    Args:
        model: with the adapter built into it, on meta: its layers know their scaling.
        adapter: the adapter's tensors, by their names in the model.
        names: all of these.
    """

    def __init__(self, model: Any, base: Reader, adapter: StoredTensors, names: Collection[str]) -> None:
        self._model = model
        self._base = base
        self._adapter = adapter
        self._trained = set(names)
        adapter_of_model = weights_of(model).adapter
        assert adapter_of_model is not None, "the adapter is built into it"
        self._experts = adapter_of_model.experts
        self._copies = {inner: name for name in names if (inner := base_name(name)) is not None}

    def read(self, name: str) -> Tensor:
        """A whole tensor: in float32 where something was merged or trained, else as the model has it."""
        if name in self._copies:
            return self._adapter.read(self._copies[name])
        module, _, leaf = name.rpartition(".")
        tensor = self._base.read(name)[...]
        if module in self._experts:
            wrapper = f"{module}.base_layer" if leaf in UP else module
            if leaf.endswith("_bias"):
                return tensor
            keys = [f"{wrapper}.{part}.{ADAPTER}.weight" for part in ("lora_A", "lora_B")]
            factors = [self._adapter.read(key) for key in keys]
            return merge_experts(tensor, self._model.get_submodule(wrapper), *factors)
        keys = [f"{module}.{part}.{ADAPTER}.weight" for part in ("lora_A", "lora_B", "lora_magnitude_vector")]
        if leaf != "weight" or keys[0] not in self._trained:
            return tensor
        values = [self._adapter.read(key) for key in keys if key in self._trained]
        return merged_weight(tensor, self._model.get_submodule(module), *values)
