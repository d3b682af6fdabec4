"""Run directories that somebody else wrote: pipes, directories, escapes, deep and long JSON end in a line, or show."""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp2kit.errors import UserError
from fsdp2kit.report import serve
from fsdp2kit.report.page import build_page
from fsdp2kit.report.read import parse_line, read_run
from fsdp2kit.report.runs import rows_of
from fsdp2kit.report.serve import PageServer, build_server
from tests.report.helpers import write_run
from tools import report as report_tool
from tools import runs as runs_tool

FILES = ["metrics.jsonl", "events.jsonl", "samples.jsonl", "config.toml", "environment.json"]
EVENT = {"time": 1.7e9, "start": 1}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_named_in_a_line(
    tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs" / "x", events=[{**EVENT, "event": "start"}])
    (run / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run / name)
    elif kind == "directory":
        (run / name).mkdir()
    else:
        (run / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{name}: cannot be read"):
        read_run(run)
    assert report_tool.main([str(run), "--out", str(tmp_path / "x.html")]) == 2
    with pytest.raises(UserError, match=f"{name}: cannot be read"):
        build_server([run], port=0)
    capsys.readouterr()
    assert runs_tool.main([str(tmp_path / "runs")]) == 0
    assert "unreadable" in capsys.readouterr().out


@pytest.mark.timeout(30)
def test_a_pipe_for_a_lock_or_a_traceback_is_not_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    os.mkfifo(run / ".lock")
    assert read_run(run).state == "killed"
    (run / "errors").mkdir()
    os.mkfifo(run / "errors" / "rank-0.txt")
    assert read_run(run).state == "killed"  # a pipe is none of the run's files


def test_links_to_regular_files_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    (run / "metrics.jsonl").rename(tmp_path / "elsewhere")
    (run / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    assert read_run(run).step == 50


def test_integers_of_any_length_are_read() -> None:
    found = parse_line(b'{"step": 3, "loss": %s, "n": -%s, "m": 999999999999999999}' % (b"9" * 400, b"9" * 25))
    assert found is not None
    assert found["step"] == 3
    assert found["loss"] == math.inf
    assert found["n"] == -1e25
    assert found["m"] == 999999999999999999
    assert parse_line(b"[" * 100_000) is None
    assert parse_line(b'{"a": ' + b"9" * 5000 + b"}") == {"a": math.inf}


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 5000, "1e999", str(2**63)])
def test_a_metric_without_bounds_is_no_point(tmp_path: Path, number: str) -> None:
    run = write_run(tmp_path / "runs" / "x", evaluates=0)
    keys = ("loss", "tokens_total", "step_seconds", "mfu", "memory_gib", "tokens_per_second", "slowest_rank/data")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 51, {", ".join(f"{json.dumps(key)}: {number}" for key in keys)}}}\n')
        file.write(f'{{"step": {number}, "loss": 1.0}}\n')
    [row] = rows_of(tmp_path / "runs")
    assert row.step == 51
    assert row.loss is None or math.isfinite(row.loss)
    assert '"name":"x"' in build_page([read_run(run)])


def test_control_characters_of_a_run_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {**EVENT, "event": "start"},
        {**EVENT, "event": "failure", "text": "failed \x1b]0;x\x07 \x9b2J"},
    ]
    name = "x\x1b[2J\u202e"
    write_run(tmp_path / name, events=events, config='model.path = "m\\u001b[31m"\n')
    for arguments in ([str(tmp_path)], [str(tmp_path), "--json"]):
        assert runs_tool.main(arguments) == 0
        out = capsys.readouterr().out
        assert not set(out) & {"\x1b", "\x9b", "\x07", "\u202e"}
    assert runs_tool.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "x\\x1b[2J\\u202e" in out
    assert "failed \\x1b]0;x\\x07 \\x9b2J" in out
    assert report_tool.main([str(tmp_path / name), "--out", str(tmp_path / f"{name}.html")]) == 0
    assert "x\\x1b[2J\\u202e.html" in capsys.readouterr().out


def test_secrets_that_older_versions_wrote_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "https://me:pa55w0rd@host/x?token=pa55w0rd"
    events = [{**EVENT, "event": kind, "text": f"{kind} {secret}"} for kind in ("start", "warning", "failure")]
    run = write_run(tmp_path / "runs" / "x", events=events, config=f'rollout.url = "{secret}"\n')
    (run / "environment.json").write_text(json.dumps({"command": f"run {secret} --password pa55w0rd"}))
    assert "pa55w0rd" not in build_page([read_run(run)])
    assert runs_tool.main([str(tmp_path / "runs"), "--json"]) == 0
    assert "pa55w0rd" not in capsys.readouterr().out


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setattr(serve._Handler, "timeout", 0.3)
    server = build_server([write_run(tmp_path / "x")], port=0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("begin", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_an_idle_connection_is_closed(server: PageServer, begin: bytes) -> None:
    assert serve.IDLE_SECONDS <= 30
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as connection:
        connection.sendall(begin)
        started = time.monotonic()
        assert connection.recv(100) == b""
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "query", ["after=" + "9" * 5000, "after=-1", "after=1e9", "after=", "version=\x1b&after=3,4", "after=" + "9" * 19]
)
def test_what_no_page_asks_gets_everything(server: PageServer, query: str, capsys: pytest.CaptureFixture[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    version = json.loads(get(connection, "/data.json"))["version"]
    found = json.loads(get(connection, f"/data.json?version={version}&{query}".replace("\x1b", "%1b")))
    assert found["is_whole"]
    assert capsys.readouterr().err == ""


def get(connection: http.client.HTTPConnection, path: str) -> bytes:
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200
    return answer.read()
