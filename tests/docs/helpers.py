"""Code in README and in help(fsdp2kit)."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import fsdp2kit as fk

DOCSTRING = fk.__doc__ or ""
EXAMPLES = [textwrap.dedent(block) for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", DOCSTRING + "\n")]


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
