"""The README's snippets run: `python` and `bash` fences do, in order, in one folder; `sh` ones install things."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.test_weights import UNUSUAL
from tests.reference import TINY

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.full
def test_the_readme_runs(tmp_path: Path) -> None:
    for name in ("toml", "tools", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Commands find the interpreter that runs the tests; the source tree is importable, installed or not.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    snippets = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(snippets) >= 5
    for language, code in snippets:
        # Plain torch says so each time it reads a checkpoint in one process.
        strict = ["-W", "error", "-W", "ignore:torch.distributed is disabled"]
        command = [sys.executable, *strict, "-c", code] if language == "python" else ["bash", "-euc", code]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{code}\n{result.stdout}\n{result.stderr}"


def test_the_readme_names_what_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+)`(?=[^|\n]*\|)", text.split("| TOML |")[1].split("\n\n")[0]):
        assert (ROOT / "toml" / f"{name}.toml").is_file(), name
    for name in re.findall(r"`(\w+(?:/\w+)+\.py)`", text.split("## Extend it")[1]):
        assert (ROOT / "fsdp2kit" / name).is_file() or (ROOT / name).is_file(), name
    for target in re.findall(r"\]\(([\w/.]+)\)", text):
        assert (ROOT / target).exists(), target


def test_the_readme_lists_the_architectures_of_the_tests() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Models")[1].split("\n## ")[0]
    held = text.split("Heads and random")[0]
    assert set(re.findall(r"`([\w-]+)`", held)) == {model_type for model_type, _ in TINY.values()}
    assert set(UNUSUAL) <= {*re.findall(r"`([\w-]+)`", text), "diffllama", "minimax", "olmo_hybrid"}
