"""`fsdp2kit runs`: a table of runs, or JSON; quick, and one line where there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that failed, and an older one that tells little."""
    done, bare = tmp_path / "runs" / "sweep" / "a", tmp_path / "runs" / "b"
    done.mkdir(parents=True)
    bare.mkdir()
    records = [{"step": 1, "loss": 2.0, "eval_loss": 1.75, "tokens_per_second": 999.0}]
    records += [{"step": 2, "loss": 1.5, "tokens_per_second": 12345.6}]
    (done / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    events = [{"time": 1.0, "event": "start", "start": 1}]
    events += [{"time": 2.0, "event": "failure", "start": 1, "text": "x.toml: bad [thing]; mend it"}]
    (done / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (done / "config.toml").write_text('recipe = "/my/own.py"\nmodel.path = "/models/SmolLM2"\ntrain.steps = 9\n')
    mesh = {"dp_replicate": 1, "dp_shard": 4, "cp": 2}
    (done / "environment.json").write_text(json.dumps({"mesh": mesh, "world_size": 8}))
    (bare / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    os.utime(bare / "metrics.jsonl", (1e9, 1e9))
    return tmp_path / "runs"


def test_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main([str(folder)]) == 0
    header, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["run", "recipe", "model", "mesh", "step", "loss", "eval_loss", "tokens/s", "seen", "state"]
    row = ["sweep/a", "own", "SmolLM2", "dp_shard", "4", "cp", "2", "2/9", "1.5000", "1.7500", "12,346"]
    assert first[: len(row)] == row
    assert " ".join(first[-6:]) == "failed: x.toml: bad [thing]; mend it"
    assert (second[0], second[1], second[-4:]) == ("b", "1/?", ["killed:", "after", "step", "1"])


def test_json(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)  # "runs" is the default
    assert runs.main(["--json"]) == 0
    first, second = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert (first["name"], first["mesh"]["dp_shard"], first["world_size"]) == ("sweep/a", 4, 8)
    assert (first["step"], first["total_steps"], first["loss"], first["eval_loss"]) == (2, 9, 1.5, 1.75)
    assert runs.main(["--json", "--last", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == [first]
    assert (second["name"], second["loss"], second["total_steps"], second["seen"]) == ("b", None, None, 1e9)


def test_no_runs_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, what in ((tmp_path, "has no runs in it"), (tmp_path / "none", "is no directory")):
        assert runs.main([str(path)]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err) == (
            "",
            f"error: {path}: {what}; name a directory with run directories: fsdp2kit runs DIR\n",
        )


def test_it_starts_without_torch(folder: Path) -> None:
    heavy = ("torch", "transformers", "pydantic", "datasets", "numpy")
    code = "import sys; from fsdp2kit import __main__; from tools import runs; runs.main(sys.argv[1:]); "
    code += f"print(*{{*sys.modules}} & {{*{heavy}}}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "\n")
