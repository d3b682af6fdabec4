"""What a checkpoint's manifest says of the parts beside a text part. Imports no torch, as `verify` does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RECORD = "carried"
"""The key of `fsdp2kit.weights.parts.parts_record` in a manifest's environment."""


@dataclass(frozen=True)
class RecordedParts:
    """What a manifest's environment says of other parts; the field has the name `RECORD`."""

    carried: dict[str, Any] = field(default_factory=dict)
