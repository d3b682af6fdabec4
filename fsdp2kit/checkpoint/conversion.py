"""What transformers calls a model's tensors on disk, where that differs from the names of its modules.

transformers 5 converts some checkpoints while loading (the experts of a mixture become one fused parameter) and
reverts that in `save_pretrained`. An export does the same, group by group, so that no whole model need be in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fsdp2kit.errors import UserError


def model_on_meta(config_dir: Path) -> PreTrainedModel | None:
    """The model of ``config_dir/config.json`` without storage; None where transformers does not know the class itself.

    Raises:
        UserError: there is no config, or transformers cannot build the model from it.
    """
    path = config_dir / "config.json"
    todo = "give a directory with the model's config.json as --config"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read ({error})", todo) from error
    architecture = next(iter(raw.get("architectures") or ()), None)
    if "auto_map" in raw and not hasattr(transformers, architecture or ""):
        return None
    try:
        config = AutoConfig.from_pretrained(config_dir, local_files_only=True, trust_remote_code=False)
        build: Callable[..., PreTrainedModel] = getattr(
            transformers, architecture or "", AutoModelForCausalLM.from_config
        )
        with torch.device("meta"):
            return build(config)
    except Exception as error:  # transformers raises nearly anything on a config it does not like
        what = f"transformers cannot build the model ({type(error).__name__}: {error})"
        raise UserError(str(path), what, todo) from error


def to_file_names(model: PreTrainedModel | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A group of tensors by module name → the same, converted and named as `save_pretrained` writes them."""
    return tensors if model is None else revert_weight_conversion(model, dict(tensors))


def conversion_groups(model: PreTrainedModel | None, tensors: dict[str, Tensor]) -> list[list[str]]:
    """The finest of three groupings of `tensors` that converts to the same names and shapes as all of them at once.

    Tried in turn are every tensor by itself, the tensors of one module, and those of one decoder layer.

    Args:
        tensors: meta tensors by module name.

    Raises:
        UserError: transformers needs more than a decoder layer at a time to convert this architecture.
    """
    expected = _shapes(to_file_names(model, tensors))
    for group_of in (lambda name: name, _module_of, _layer_of):
        groups: dict[str, list[str]] = {}
        for name in tensors:
            groups.setdefault(group_of(name), []).append(name)
        converted: dict[str, tuple[int, ...]] = {}
        try:
            for names in groups.values():
                converted.update(_shapes(to_file_names(model, {name: tensors[name] for name in names})))
        except Exception:  # an incomplete group makes a conversion fail in any way it likes; try a larger one
            continue
        if converted == expected:
            return list(groups.values())
    kind = type(model).__name__
    what = f"the export of {kind} is not supported yet: its tensors cannot be converted a decoder layer at a time"
    raise UserError("export", what, f"load the checkpoint into a {kind} and call save_pretrained")


def _module_of(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[0]


def _layer_of(name: str) -> str:
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
