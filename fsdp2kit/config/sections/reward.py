"""[[reward]]: functions that reward responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, JsonValue, PositiveFloat, ValidationInfo

from fsdp2kit.config.section import FunctionPath, Section, absolute_path


def _absolute_files(value: Any, info: ValidationInfo) -> Any:
    """Make the paths absolute that options named ``…_file`` are."""
    if not isinstance(value, dict):
        return value
    found = {name: absolute_path(one, info) if name.endswith("_file") else one for name, one in value.items()}
    for name, file in found.items():
        if name.endswith("_file") and not (isinstance(file, str) and Path(file).is_file()):
            raise ValueError(f"{name} = {file!r}: no such file")
    return found


FunctionOptions = Annotated[dict[str, JsonValue], BeforeValidator(_absolute_files)]
"""Keyword arguments of a function. A name that ends in ``_file`` is of a path, relative to the TOML."""


class RewardConfig(Section):
    """A reward function; docs/grpo.md says what it is given."""

    function: FunctionPath
    """`module:function`, or `path.py:function` with a path relative to this TOML."""
    options: FunctionOptions = {}
    """Further keyword arguments of every call. One whose name ends in `_file` is a path relative to this TOML."""
    name: str | None = None
    """Name in the metrics. Default: the function's."""
    weight: float = 1.0
    """Rewards are summed with these weights."""
    timeout_seconds: PositiveFloat = 60.0
    """How long a call, for some of a step's responses, may take before the run stops."""

    @property
    def label(self) -> str:
        """`name`, or its default."""
        return self.name or self.function.rpartition(":")[2]
