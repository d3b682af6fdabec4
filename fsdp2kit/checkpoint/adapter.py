"""Exports of checkpoints that hold adapters: a directory as peft writes it, or the model with the adapter merged in.

What is exported is read a tensor at a time, either from the checkpoint alone, or from the checkpoint and from the
safetensors of the model that the adapter was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp2kit.checkpoint.manifest import Manifest
from fsdp2kit.checkpoint.reader import StoredTensors, in_blocks
from fsdp2kit.checkpoint.staging import RECORD
from fsdp2kit.checkpoint.state import MODEL_PREFIX
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import read_json_object
from fsdp2kit.files.redaction import without_secrets
from fsdp2kit.model.adapters import CONFIG_NAME, inject, merged_weight, read_adapter_config
from fsdp2kit.model.assets import find_hf_dir, weights_digest
from fsdp2kit.model.build import model_on_meta
from fsdp2kit.model.expert_adapters import merge_experts
from fsdp2kit.model.experts import UP, find_experts
from fsdp2kit.model.names import ADAPTER, base_name
from fsdp2kit.model.weights import StoredTensor


def holds_adapter(config_dir: Path) -> bool:
    """Whether a checkpoint with these assets holds adapters instead of a model."""
    return (config_dir / CONFIG_NAME).is_file()


def names_experts(config_dir: Path) -> bool:
    """Whether its adapter's file has a factor for each layer of each expert."""
    model = model_on_meta(config_dir)
    if model is None or not find_experts(model):
        return False
    return bool(inject(model, read_adapter_config(config_dir, str(config_dir))).expert_leaves)


def check_same_base(directory: Path, weights: str) -> None:
    """Refuse an adapter that an export of ours says was trained on other weights.

    Args:
        weights: the current model's weights, as in `run_identity`.
    """
    try:
        trained_on = read_json_object(directory / RECORD).get("base")
    except (OSError, ValueError):
        trained_on = None  # not an export of ours; names and shapes are compared in any case
    if trained_on is not None and trained_on != without_secrets(weights):
        what = f"{directory} was trained on another model than model.path is (its weights are {trained_on})"
        raise UserError("model.adapter", what, "give the model.path that it was trained on")


def describe_base(directory: Path, path: str | None) -> list[str]:
    """A line where the config of an adapter that is not an export of ours names another model than ``model.path``."""
    name = _base_of(directory)
    if not name or not path or (directory / RECORD).is_file() or Path(name).name == Path(path).name:
        return []
    return [
        f"warning: model.adapter: {directory} names {name} as its model, and model.path is {path}: are they the same?"
    ]


def _base_of(directory: Path) -> str | None:
    """The model that an adapter's config names; None if it names none."""
    path = directory / CONFIG_NAME
    try:
        name = read_json_object(path).get("base_model_name_or_path")
        if name is not None and not isinstance(name, str):
            raise ValueError(f"base_model_name_or_path is {name!r}, not a text")
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"is not an adapter's config ({error})", "give the directory of one") from None
    return name


def find_base(config_dir: Path, manifest: Manifest | None, base: str | None) -> Path:
    """The directory of the model that a checkpoint's adapter was trained on.

    Args:
        base: where it is now; None: where it was.
    """
    name = _base_of(config_dir)
    if base is None and not name:
        raise UserError("--merge", "the adapter's config names no model", "give its directory: --merge DIR")
    found = find_hf_dir(str(base or name), key="--merge", with_weights=True)
    trained_on = manifest.identity.get("model.weights") if manifest else None
    if trained_on is not None and trained_on != f"pretrained {weights_digest(found)}":
        what = f"{found} holds other weights than the adapter was trained on ({name})"
        raise UserError("--merge", what, "give the directory of that model: --merge DIR")
    return found


class MergedTensors:
    """The tensors of ``base`` by name, with an adapter merged into them; each is made when it is read."""

    def __init__(self, config_dir: Path, base: Mapping[str, StoredTensor], adapter: StoredTensors) -> None:
        # On meta; its layers know their scaling.
        self._model: Any = model_on_meta(config_dir)
        self._experts = inject(self._model, read_adapter_config(config_dir, "--merge")).experts
        self._base, self._adapter = base, adapter
        names = [key.removeprefix(MODEL_PREFIX) for key in adapter.keys if key.startswith(MODEL_PREFIX)]
        self._trained = set(names)
        self._copies = {inner: name for name in names if (inner := base_name(name)) is not None}

    def read(self, name: str) -> Tensor:
        """A whole tensor: in float32 where something was merged or trained, else as the model has it."""
        if name in self._copies:
            return self._adapter.read(MODEL_PREFIX + self._copies[name])
        module, _, leaf = name.rpartition(".")
        tensor = self._base[name].read()
        if module in self._experts:
            wrapper = f"{module}.base_layer" if leaf in UP else module
            if leaf.endswith("_bias"):
                return tensor
            keys = [f"{wrapper}.{part}.{ADAPTER}.weight" for part in ("lora_A", "lora_B")]
            factors = [self._adapter.read(MODEL_PREFIX + key) for key in keys]
            return merge_experts(tensor, self._model.get_submodule(wrapper), *factors)
        keys = [f"{module}.{part}.{ADAPTER}.weight" for part in ("lora_A", "lora_B", "lora_magnitude_vector")]
        if leaf != "weight" or keys[0] not in self._trained:
            return tensor
        values = [self._adapter.read(MODEL_PREFIX + key) for key in keys if key in self._trained]
        return merged_weight(tensor, self._model.get_submodule(module), *values)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Its elements in order, as flat tensors of at most 16 MiB."""
        yield from in_blocks(self.read(name))
