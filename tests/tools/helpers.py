"""The bench as a command, and its last line."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from tests.support.workers import run_command
from tools.benchmarks.harness import measure


def tool(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command("tools.bench", *arguments, **environment)


def last_result(bench: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """What the command line prints."""
    *_, result = measure(bench, **options)
    return result
