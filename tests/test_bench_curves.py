"""The comparison of runs: figures against numpy's, a picture, and one line for each of a user's mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from tests.test_bench import tool

STEPS = 30


def make_run(folder: Path, name: str, *, scale: float, data: str = "a.jsonl", lr: float = 1e-4) -> Path:
    path = folder / name
    path.mkdir()
    config = {
        "optimizer": {"name": name, "lr": lr},
        "data": {"path": data},
        "eval": {"path": "held.jsonl"},
        "train": {"global_batch_size": 2},
        "run": {"seed": 0},
    }
    (path / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    records = [
        {"step": step, "loss": scale * 10 / step, "step_seconds": float(step), "memory_gib": 1 + step / 100}
        for step in range(1, STEPS + 1)
    ]
    for record in records[9::10]:
        record["eval_loss"] = scale * (2 + 1 / record["step"])
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def curves(*arguments: object) -> subprocess.CompletedProcess[str]:
    return tool("curves", *map(str, arguments))


def test_runs_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, two = make_run(tmp_path, "one", scale=1.0), make_run(tmp_path, "two", scale=1.01, lr=3e-4)
    picture, out = tmp_path / "x.png", tmp_path / "x.json"
    done = curves(two, one, "--reference", "one", "--figure", picture, "--out", out)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    second, first = result["rows"]
    assert (first["run"], second["run"], first["ratio"]) == ("one", "two", 1.0)
    assert second["ratio"] == pytest.approx(1.01)
    assert first["loss"] == pytest.approx(np.mean([10 / step for step in range(11, 31)]))
    assert first["eval_loss"] == pytest.approx(2 + 1 / 30)
    assert (first["step_seconds"], first["memory_gib"], first["steps"]) == (15.5, 1.3, STEPS)
    lines = done.stdout.splitlines()
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[2].startswith("| two | two | 0.0003 | 30 |")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 150_000


def test_a_shorter_run_is_compared_where_it_ends(tmp_path: Path) -> None:
    whole, short = make_run(tmp_path, "whole", scale=1.0), make_run(tmp_path, "short", scale=1.1)
    metrics = short / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text(encoding="utf-8").splitlines(keepends=True)[:15]), encoding="utf-8")
    done = curves(whole, short, "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["rows"][1]
    assert (row["steps"], row["eval_step"]) == (15, 10)
    assert row["ratio"] == pytest.approx(1.1)


def test_a_run_without_evaluations_has_no_ratio(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", scale=1.0)
    metrics = run / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    metrics.write_text(
        "".join(json.dumps({**record, "eval_loss": None}) + "\n" for record in records), encoding="utf-8"
    )
    done = curves(run)
    assert done.returncode == 0, done.stderr
    assert "| — | — | — |" in done.stdout


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    good, other = make_run(tmp_path, "good", scale=1.0), make_run(tmp_path, "other", scale=1.0, data="b.jsonl")
    no_metrics, torn = make_run(tmp_path, "no_metrics", scale=1.0), make_run(tmp_path, "torn", scale=1.0)
    (no_metrics / "metrics.jsonl").unlink()
    (torn / "metrics.jsonl").write_text('{"step": 1, "lo', encoding="utf-8")
    (tmp_path / "again").mkdir()
    same_name = make_run(tmp_path / "again", "good", scale=1.0)
    cases: dict[str, tuple[object, ...]] = {
        "no such directory": (tmp_path / "missing",),
        "has no metrics.jsonl": (no_metrics,),
        "cannot be read": (torn,),
        "data.path: 'a.jsonl' in good, 'b.jsonl' in other": (good, other),
        "two runs are called 'good'": (good, same_name),
        "--reference: no run is called 'x'": (good, "--reference", "x"),
        "--figure: ": (good, "--figure", tmp_path / "no" / "x.png"),
    }
    for message, arguments in cases.items():
        done = curves(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), (message, done.stderr)
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert message in line


def test_the_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp2kit.command_line import new_figure
    from fsdp2kit.errors import UserError

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"^--figure: .*fsdp2kit\[plot\]"):
        new_figure("--figure")
