"""What every TOML section is, and the marks of fields that hold paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class InputPathMark:
    """Marks a field whose value, when written in a TOML, is relative to that TOML."""

    hub: bool
    """Whether the value may be a hub id instead."""


InputPath = Annotated[str, Field(min_length=1), InputPathMark(hub=True)]
LocalPath = Annotated[str, Field(min_length=1), InputPathMark(hub=False)]


class Section(BaseModel):
    """A TOML section: unknown keys are errors, values are not coerced across types, instances do not change."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
