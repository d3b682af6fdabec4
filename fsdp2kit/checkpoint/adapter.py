"""Whether a checkpoint or a directory holds adapters, and which model they belong to."""

from __future__ import annotations

from pathlib import Path

from fsdp2kit.checkpoint.staging import RECORD
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import read_json_object
from fsdp2kit.files.redaction import without_secrets
from fsdp2kit.weights.adapters import CONFIG_NAME


def holds_adapter(config_dir: Path) -> bool:
    """Whether a checkpoint with these assets holds adapters instead of a model."""
    return (config_dir / CONFIG_NAME).is_file()


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
    name = base_of(directory)
    if not name or not path or (directory / RECORD).is_file() or Path(name).name == Path(path).name:
        return []
    return [
        f"warning: model.adapter: {directory} names {name} as its model, and model.path is {path}: are they the same?"
    ]


def base_of(directory: Path) -> str | None:
    """The model that an adapter's config names; None if it names none."""
    path = directory / CONFIG_NAME
    try:
        name = read_json_object(path).get("base_model_name_or_path")
        if name is not None and not isinstance(name, str):
            raise ValueError(f"base_model_name_or_path is {name!r}, not a text")
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"is not an adapter's config ({error})", "give the directory of one") from None
    return name
