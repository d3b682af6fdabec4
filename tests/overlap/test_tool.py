"""The command line: figures, JSON, the picture, and one line for every mistake."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from tests.overlap.helpers import ALL_GATHER, GEMM, Trace, fsdp_step, straggling
from tools.overlap_report import main


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose step 5 took 1 ms."""
    trace = Trace(world_size=1)
    trace.content["fsdp2kit"] = {"first_step": 1}
    fsdp_step(trace)
    trace.write(tmp_path / "run" / "trace" / "rank-00000.json.gz")
    (tmp_path / "run" / "config.toml").write_text("[fsdp]\nforward_prefetch = 2\n")
    return tmp_path / "run"


@pytest.mark.parametrize("inside", ["", "trace", "trace/rank-00000.json.gz"])
def test_json(inside: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir / inside), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (step,) = found["steps"]
    assert (step["step"], step["slowest_rank"]) == (5, 0)
    (rank,) = step["ranks"]
    parts = ("compute_only_ms", "overlapped_ms", "exposed_ms", "idle_ms")
    assert [rank[name] for name in parts] == [0.49, 0.18, 0.12, 0.21]
    assert found["mean"]["duration_ms"] == rank["duration_ms"] == 1.0
    assert found["mean"]["overlap"] == rank["overlap"] == pytest.approx(0.6)  # 180 of 300 µs
    assert found["mean"]["collectives"][0] == {"kind": "all_gather", "phase": "forward", "exposed_ms": 0.07}
    assert {row["unit"] for row in rank["units"]} == {"(root)", "model.layers.0", "model.layers.1", ""}
    assert ("fsdp.forward_prefetch", "3") in {(one["key"], one["value"]) for one in found["advice"]}


def test_the_table_and_where_communication_is_exposed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir), "--units", "2"]) == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    figures = ["1.0", "0.5", "0.2", "0.1", "0.2", "0.0", "60 %"]
    assert rows == [["5", "0", *figures], ["mean", "", *figures]]
    words = " ".join(shown.split())
    assert (
        "exposed by collective: all_gather of forward 0.1 ms (7.0 %), reduce_scatter of backward 0.0 ms (4.0 %)"
        in words
    )
    assert "exposed by unit: (root) 0.1 ms (6.0 %), model.layers.0 0.0 ms (3.0 %); 1 more" in words
    assert "fsdp.forward_prefetch = 3: 7 % of the step are exposed all-gathers of forward" in words


def test_of_many_ranks_the_slowest_is_shown_and_missing_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in (12, 14):
        straggling(tmp_path, ranks=range(12), world_size=size)
        assert main([str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        rows = [line.split("│")[1:3] for line in shown.splitlines() if line.startswith("│")]
        assert [[cell.strip() for cell in row] for row in rows] == [["0", "1 (slowest)"], ["mean", ""]]
        assert ("no trace of rank 12, 13" in shown) == (size == 14)


def test_a_step_without_its_optimizer_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace()
    for number in range(2):
        trace.step(number, 100 * number, 100 * (number + 1))
    trace.mark("Optimizer.step#AdamW.step", 80, 90)
    trace.kernel(GEMM, 150, 180)
    trace.write(tmp_path / "rank-00000.json")
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "1 *" in shown
    assert "* no optimizer step: cut off or skipped; not in the mean" in shown


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (None, b"", "does not exist; run with profile.enabled = true"),
        # A run's, which lies beside its trace.
        ("environment.json", b"{}", "holds no trace (*.json, *.json.gz); run with profile.enabled = true"),
        ("rank-00000.json.gz", gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:40], "is cut off or damaged"),
        ("rank-00000.json.gz", b"plain", "is cut off or damaged"),
        ("rank-00000.json", b'{"traceEvents": [{"ph": "X", "na', "is no whole JSON"),
        ("rank-00000.json", b"\xff\xfe\x00", "is no whole JSON"),
        ("rank-00000.json", b"[]", 'has no "traceEvents"'),
        ("rank-00000.json", b'{"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1}]}', "an event without a time"),
        ("rank-00000.json", b'{"traceEvents": []}', "holds no event of a step"),
    ],
)
def test_mistakes_are_one_line(
    name: str | None, content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trace"
    if name is not None:
        folder.mkdir()
        (folder / name).write_bytes(content)
    assert main([str(folder)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(f"error: {folder}")
    assert found.err.count("\n") == 1
    assert told in found.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--units=-1"], "--units: -1 is negative; give 0 or more"),
        (["--step=5"], "--step: says which step --png draws, and there is no --png; give --png FILE, or leave it out"),
        (["--png=a.png", "--step=4"], "--step: 4 was not traced; one of 5"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], told: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir), *options]) == 2
    assert capsys.readouterr() == ("", f"error: {told}\n")


def test_two_traces_of_one_rank_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.json", "b.json"):
        trace = Trace(rank=3, world_size=4)
        trace.step(0, 0, 10)
        trace.write(tmp_path / name)
    assert main([str(tmp_path)]) == 2
    assert "b.json: is of rank 3, and so is a.json" in capsys.readouterr().err


def colored(path: Path) -> dict[str, int]:
    """Pixels of the picture, by what their colour means."""
    image = pytest.importorskip("matplotlib.image")
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    meanings = {
        "compute": (31, 111, 180),
        "hidden": (58, 166, 85),
        "exposed": (214, 40, 40),
        "waiting": (242, 167, 167),
    }
    return {name: int((abs(pixels - color).max(axis=1) <= 2).sum()) for name, color in meanings.items()}


def test_the_picture_shows_the_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    found = {}
    for name, gather in {"hidden": (100, 500), "exposed": (500, 900), "none": (0, 0)}.items():
        trace = Trace()
        trace.step(0, 0, 1000)
        trace.kernel(GEMM, 100, 500)
        trace.kernel(ALL_GATHER, *gather, stream=20)
        trace.write(tmp_path / name / "rank-00000.json")
        assert main([str(tmp_path / name), "--png", str(tmp_path / f"{name}.png")]) == 0
        found[name] = colored(tmp_path / f"{name}.png")
    legend = found["none"]
    assert found["hidden"]["exposed"] == found["exposed"]["waiting"] + legend["exposed"] - legend["waiting"]
    # Communication is as long as compute, once in green and once in red.
    compute = found["none"]["compute"] - legend["hidden"]
    assert found["hidden"]["hidden"] - legend["hidden"] == pytest.approx(compute, rel=0.03)
    assert found["exposed"]["exposed"] - legend["exposed"] == pytest.approx(compute, rel=0.03)
    assert "wrote" in capsys.readouterr().out


def test_the_picture_needs_matplotlib(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(run_dir), "--png", str(run_dir / "a.png")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --png: needs matplotlib, which cannot be imported ")
    assert said.endswith("; install it: pip install 'matplotlib>=3.9'\n")


def test_a_picture_that_cannot_be_written(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([str(run_dir), "--png", str(run_dir / "no" / "a.png")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err
