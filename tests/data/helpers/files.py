"""Files of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


def write_rows(path: Path, rows: Iterable) -> Path:
    """Write a line of JSON for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
