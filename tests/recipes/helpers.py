"""What tests of whole runs share."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from unittest import mock

from fsdp2kit.run import main as run_main

PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"Is {at} odd?"}],
        "chosen": [{"role": "assistant", "content": f"{at} is {'odd' if at % 2 else 'even'}."}],
        "rejected": [
            {"role": "assistant", "content": f"I like the number {at}, it is a {'small' * (1 + at % 3)} one"}
        ],
    }
    for at in range(24)
]


ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "toml" / "demo"


def attempt(arguments: list[str], folder: str) -> tuple[int, str, str]:
    """One rank of `fsdp2kit.run`, in this worker: exit code, stdout, stderr."""
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("os._exit", side_effect=sys.exit),
    ):
        try:
            code = run_main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def toml_for(model: Path, folder: Path, **sections: str) -> Path:
    """A small valid TOML, to which a case adds its mistake by overrides."""
    path = folder / "x.toml"
    path.write_text(
        f"""recipe = "sft"
[run]
dir = "{folder}/run"
[model]
path = "{model}"
[mesh]
cp = 2
[fsdp]
param_dtype = "float32"
[data]
path = "{DEMO}/heldout.jsonl"
seq_len = 64
[train]
steps = 2
global_batch_size = 2
[wandb]
mode = "disabled"
{sections.get("more", "")}
"""
    )
    return path
