"""Long work shows bars in a terminal and lines elsewhere, on the main rank alone, up to their totals."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp2kit import console
from fsdp2kit.checkpoint.from_hf import hf_to_dcp
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.checkpoint.state import load_weights
from fsdp2kit.config.schema import ChatDataConfig, ModelConfig
from fsdp2kit.console import Bar, Line, progress_bar, rich_console, say, show, visible
from fsdp2kit.data.documents import build_documents
from fsdp2kit.data.loader import Share, build_loader
from fsdp2kit.model.build import build_model, materialize
from fsdp2kit.weights.load import load_pretrained
from tests.recipes.helpers import attempt, toml_for
from tests.recipes.test_bad_input import model_dir
from tests.support.models import tiny_model_dir
from tests.support.workers import WorkerPool

__all__ = ["model_dir"]  # a fixture

DEMO = Path(__file__).parent.parent / "toml" / "demo"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stdout by a terminal and return it. Not a fixture: pytest replaces stdout after fixtures ran."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(console, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(console, "_PAINT_SECONDS", 0.01)
    return shown


def test_without_a_terminal_lines_come_even_while_nothing_advances(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console.LINE_SECONDS <= 20
    monkeypatch.setattr(console, "LINE_SECONDS", 0.05)
    with progress_bar("verifying", total=4_000_000) as bar:
        bar.advance(1_000_000)
        out, err = capsys.readouterr()
        while err.count("\n") < 3:
            time.sleep(0.02)
            out, err = (old + new for old, new in zip((out, err), capsys.readouterr(), strict=True))
    out, err = (old + new for old, new in zip((out, err), capsys.readouterr(), strict=True))
    assert out == "", "stdout may be a tool's JSON"
    *lines, last = err.splitlines()
    assert all(line.startswith("verifying: 1.0 MB of 4.0 MB, ") and line.endswith(" left") for line in lines)
    assert last.startswith("verifying: 1.0 MB in 0:00:0")


def test_rate_and_remaining_time_are_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bar = Bar("tokenising a.jsonl", unit="rows", total=50_000)
    now[0] += 10
    assert str(bar) == "tokenising a.jsonl: 0 rows of 50,000 rows, 0 rows/s"
    bar.advance(12_000)
    assert str(bar) == "tokenising a.jsonl: 12,000 rows of 50,000 rows, 1,200 rows/s, 0:00:32 left"
    bar.total = None
    assert str(bar) == "tokenising a.jsonl: 12,000 rows, 1,200 rows/s"


def test_a_noun_agrees_with_its_number() -> None:
    assert [console.counted(number, "row") for number in (0, 1, 1000)] == ["0 rows", "1 row", "1,000 rows"]
    assert [console.counted(number, "micro-batch") for number in (1, 2)] == ["1 micro-batch", "2 micro-batches"]


def test_short_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("verifying", total=1) as bar:
        bar.advance(1)
    assert capsys.readouterr() == ("", "")


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(console, "LINE_SECONDS", 0.01)
    say("hello")
    with progress_bar("verifying", total=1):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_bars_stand_together_and_the_cursor_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    line = Line()
    line.paint(["step 1/2"], done=1, total=2)
    with progress_bar("converting", total=100) as bar:
        bar.advance(50)
        say("[saved] a checkpoint")
        time.sleep(0.2)
    line.paint(["step 2/2"], done=2, total=2)
    line.close()
    shown = terminal.getvalue()
    assert "converting: 50 bytes of 100 bytes" in shown
    assert "[saved] a checkpoint" in shown
    assert "step 2/2" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_a_failure_within_takes_the_bar_away_and_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)

    def convert() -> None:
        with progress_bar("converting", total=100):
            time.sleep(0.1)
            raise KeyError

    with pytest.raises(KeyError):
        convert()
    assert terminal.getvalue().count("\x1b[?25h") == 1
    say("plain again")
    assert terminal.getvalue().endswith("plain again\n")


def test_a_lost_console_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(console, "LINE_SECONDS", 0.01)
    say("hello")
    with progress_bar("verifying", total=1):
        time.sleep(0.05)


# Work that counts its units


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """Collects every bar that is made."""
    made: list[Bar] = []

    class Recorded(Bar):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(console, "Bar", Recorded)
    return made


def finished(bars: list[Bar]) -> dict[str, float]:
    """Units done by each bar's name, after checking that each bar reached its total."""
    for bar in bars:
        assert bar.done == pytest.approx(bar.total), bar.what
    return {bar.what: bar.done for bar in bars}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_rows_and_documents_are_counted_to_the_last(
    kind: str, bars: list[Bar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lines = (DEMO / "chat.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        import datasets

        datasets.Dataset.from_json(str(DEMO / "chat.jsonl"), cache_dir=str(tmp_path / "hf")).to_parquet(path)
    elif kind == "jsonl":
        path.write_text("".join(lines))
    else:
        path.mkdir()
        for name, part in (("a", lines[:100]), ("b", lines[100:])):
            (path / f"{name}.jsonl").write_text("".join(part))
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "tokenizer")
    documents = build_documents(ChatDataConfig(path=str(path), seq_len=64), tokenizer=tokenizer)
    build_loader([documents], share=Share(64, 4), pack=True, shuffle=True, seed=0, names=["mine"])
    counts = finished(bars)
    assert counts == {f"tokenising {path.name}": len(lines), "packing mine": len(documents)}


def test_bytes_of_weights_are_counted_to_the_last(bars: list[Bar], tmp_path: Path) -> None:
    folder = tiny_model_dir("smollm2", tmp_path)
    model = build_model(ModelConfig(path=str(folder)))
    materialize(model, device=torch.device("cpu"))
    load_pretrained(model, folder)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert finished(bars) == {"reading weights": size}
    bars.clear()
    hf_to_dcp(folder, tmp_path / "dcp")
    assert finished(bars) == {"converting": size}
    bars.clear()
    verify(tmp_path / "dcp")
    files = [path for path in (tmp_path / "dcp").rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert finished(bars) == {"verifying dcp": sum(path.stat().st_size for path in files)}
    bars.clear()
    load_weights(tmp_path / "dcp", AutoModelForCausalLM.from_pretrained(folder))
    assert finished(bars)["reading weights"] == size
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    bars.clear()
    dcp_to_hf(tmp_path / "dcp", tmp_path / "out")
    [converting] = [bar for bar in bars if bar.what == "converting"]
    header = (tmp_path / "out" / "model.safetensors").stat().st_size - size
    assert (converting.done, converting.total) == (size, size + header)


# A whole run


def test_a_run_says_what_is_known_when_it_is_known_and_at_its_end_where_all_is(
    pool: WorkerPool, model_dir: Path, tmp_path: Path
) -> None:
    toml, run_dir = toml_for(model_dir, tmp_path), tmp_path / "run"
    held_out = [f"eval.path='{DEMO / 'heldout.jsonl'}'", "eval.every=2", "eval.max_new_tokens=2"]
    prompts = ['eval.prompts=["What is wet?"]', f"data.path='{DEMO / 'chat.jsonl'}'", "checkpoint.every=1"]
    (code, out, _), (_, other, _) = pool.run(2, attempt, [str(toml), *held_out, *prompts], str(tmp_path))
    assert (code, other) == (0, "")
    checkpoint = run_dir / "checkpoints" / "step-000002"
    expected = ["mesh: ", "data: 600 documents", "an epoch: ", "step 1/2  loss ", f"saved {run_dir}/checkpoints/"]
    expected += ["step 2/2  loss ", "> What is wet?", f"saved {checkpoint} (", "exported step-000002 to "]
    expected += ["done: step 2 of 2 (epoch 0.0", f"metrics: {run_dir / 'metrics.jsonl'}"]
    expected += [f"checkpoint: {checkpoint}", f"model: {run_dir / 'hf'}, of step-000002"]
    lines = iter(out.splitlines())
    for beginning in expected:
        assert any(line.startswith(beginning) for line in lines), (beginning, out)
    assert f'generate {run_dir / "hf"} "…"' in out.replace("generate.py", "generate")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = int(re.search(r"an epoch: ([\d,]+) packs", out)[1].replace(",", ""))  # type: ignore[index]
    assert [record["epoch"] for record in records] == [pytest.approx(step / -(-rows // 2)) for step in (1, 2)]
    assert records[0]["time"] < records[1]["time"]

    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    where = [f"data.path='{broken}'", f"run.dir='{tmp_path / 'other'}'"]
    (code, out, err), _ = pool.run(2, attempt, [str(toml), *where], str(tmp_path))
    assert code == 2
    assert out.startswith("mesh on 1 node: "), "the plan is printed before the data is read"
    assert "broken.jsonl:1" in err


def stream_of(encoding: str) -> tuple[io.BytesIO, io.TextIOWrapper]:
    raw = io.BytesIO()
    return raw, io.TextIOWrapper(raw, encoding=encoding, errors="strict")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r", "utf-8", "utf-16"])
def test_no_encoding_loses_a_line(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    raw, stream = stream_of(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    say("mesh 2 × 4 … → done", "中 \U0001f600 \udcff é")
    show("a file of bytes: \udc9b", 3, sep=" · ", end="!\n")
    stream.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("mesh 2 ")
    if encoding == "ascii":
        assert lines == [
            "mesh 2 x 4 ... -> done",
            "\\u4e2d \\U0001f600 \\udcff \\xe9",
            "a file of bytes: \\udc9b - 3!",
        ]
    if encoding == "utf-8":
        assert lines[:2] == ["mesh 2 × 4 … → done", "中 \U0001f600 \\udcff é"]


CONTROL = "a\x1b]0;title\x07b\rc\x9b31md\x00\x7f\u202ee\u2066\x08"
CONTROL_SHOWN = "a\\x1b]0;title\\x07b\\x0dc\\x9b31md\\x00\\x7f\\u202ee\\u2066\\x08"


def test_control_characters_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert visible(CONTROL) == CONTROL_SHOWN
    assert visible("two\nlines\tand a tab, ümlaut, שלום, 👩‍👧") == "two\nlines\tand a tab, ümlaut, שלום, 👩‍👧"
    say(CONTROL)
    show(CONTROL, CONTROL, is_data=True)
    show(CONTROL, file=sys.stderr)
    said = capsys.readouterr()
    assert said.out == f"{CONTROL_SHOWN}\n{CONTROL_SHOWN} {CONTROL_SHOWN}\n"
    assert said.err == f"{CONTROL_SHOWN}\n"


def test_tables_show_control_characters_and_keep_their_colours() -> None:
    file = io.StringIO()
    console = rich_console(file=file, force_terminal=True, color_system="standard", width=60)
    table = Table(title=f"title {CONTROL}")
    table.add_column("name")
    table.add_row(Text("x\x1b[31mred\x1b[0m \x9b", style="green"))
    console.print(table, "and \x1b[2J text", markup=False, highlight=False)
    text = file.getvalue()
    assert "\x1b[32mx\\x1b[31mred\\x1b[0m \\x9b" in text
    assert "\\x1b[2J" in text
    assert "\x1b[2J" not in text
    assert "\x1b[31m" not in text
    assert "\x1b]0" not in text
    assert "\u202e" not in text


def test_a_bar_shows_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = open_terminal(monkeypatch)
    with progress_bar("reading \x1b]0;x\x07 …", total=10) as bar:
        bar.advance(5)
        time.sleep(0.05)
        say("line \x1b[2J")
    text = shown.getvalue()
    assert "\\x1b]0;x\\x07" in text
    assert "line \\x1b[2J" in text
    assert "\x1b]0;x" not in text
    assert "\x1b[2J" not in text


def test_secrets_are_not_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    say("rollouts of http://me:pw@host:8000", "hf_abcdefgh")
    show("error: https://h/x?token=abc", file=sys.stderr)
    show("a row: api_key=abcdefgh", is_data=True)
    said = capsys.readouterr()
    assert said.out == "rollouts of http://***@host:8000\n***\na row: api_key=abcdefgh\n"
    assert said.err == "error: https://h/x?token=***\n"


PRINTS = r"""
import logging, sys, threading, warnings
from fsdp2kit.console import begin_output
begin_output()
print("plain … é \udcff")
logging.getLogger("fsdp2kit.x").warning("%s", "warned \x1b[31m of https://me:pw@host")
thread = threading.Thread(target=lambda: 1 / 0, name="a\x1b[2J")
thread.start()
thread.join()
raise ValueError("raised \x1b]0;x\x07 at https://me:pw@host …")
"""


def test_what_python_prints_itself_is_shown_alike() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stdout == b"plain ... \\xe9 \\udcff\n"
    said = done.stderr.decode("ascii")
    assert "\x1b" not in said
    assert "pw@" not in said
    assert "warned \\x1b[31m of https://***@host\n" in said
    assert "Exception in thread a\\x1b[2J:\nTraceback" in said
    assert said.endswith("ValueError: raised \\x1b]0;x\\x07 at https://***@host ...\n")


def test_nothing_prints_past_the_console() -> None:
    """`print` and rich's own console know neither control characters nor secrets nor the stream's encoding."""
    root = Path(console.__file__).parent
    files = [*root.rglob("*.py"), *(root.parent / "tools").glob("*.py"), *(root.parent / "recipes").glob("*.py")]
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if name in ("print", "Console") and path.name != "console.py":
                found.append(f"{path}:{node.lineno}: {name}")
    # A console that writes no more than its record, and the class of that name for metrics.
    allowed = ("planner/report.py", "train/metrics.py")
    assert not [one for one in found if not any(name in one for name in allowed)]
