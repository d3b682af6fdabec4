"""``--check``: all that can be said of a config on this machine, without weights, network or process group."""

from __future__ import annotations

from pathlib import Path

from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.data.build import check_first_rows
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model, load_hf_config
from fsdp2kit.parallel.plan import plan_parallel


def check_offline(config: TrainingConfig, sizes: MeshSizes) -> tuple[list[str], list[str]]:
    """Plan the run as `main` of a recipe would, and read the first rows of its data.

    Returns:
        The plan's lines, or the mesh alone if the model is not on this machine; and what could not be checked because
        it is not here: "model", a TOML key, …

    Raises:
        UserError: what `build_model`, `plan_parallel` or the data would refuse.
    """
    lines, unchecked = [str(sizes)], []
    try:
        load_hf_config(config.model, local_files_only=True)
    except UserError:
        if config.model.path is None or Path(config.model.path).is_absolute():
            raise
        unchecked.append("model")
    else:
        lines = plan_parallel(build_model(config.model, local_files_only=True), config, sizes).describe()
    return lines, [*unchecked, *check_first_rows(config)]
