"""Following a run: new steps appear, a cut line waits, a resumed file is read anew, and nothing else is served."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.errors import UserError
from fsdp2kit.report.read import parse_line
from fsdp2kit.report.serve import FollowedRuns, Follower, PageServer, build_server
from tests.report.helpers import record, write_run

ROOT = Path(__file__).resolve().parents[2]


def add(run: Path, *records: dict[str, Any], end: str = "\n") -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, records)) + end)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "x", steps=5)


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    with build_server([run], port=0) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: PageServer, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_a_page_is_told_what_it_has_not(server: PageServer, run: Path) -> None:
    whole = json.loads(ask(server, "/data.json")[1])
    assert whole["is_whole"]
    assert whole["runs"][0]["step"] == 5
    add(run, record(6), record(7))
    new = json.loads(ask(server, f"/data.json?version={whole['version']}&after=5")[1])
    assert not new["is_whole"]
    assert new["runs"][0]["axes"]["step"] == [6, 1]
    assert len(new["runs"][0]["curves"]["loss"]["y"]) == 2
    nothing = json.loads(ask(server, f"/data.json?version={whole['version']}&after=7")[1])
    assert nothing["runs"][0]["curves"] == {}
    add(run, record(8, my_metric=1.0))  # a new chart
    assert json.loads(ask(server, f"/data.json?version={whole['version']}&after=7")[1])["is_whole"]


def test_only_the_page_and_its_data_are_served(server: PageServer) -> None:
    status, page = ask(server, "/")
    assert status == 200
    assert b"connect-src 'self'" in page
    for path in ("/metrics.jsonl", "/../x/metrics.jsonl", "/%2e%2e/config.toml", "//etc/passwd", "/data.json/x", "/x"):
        assert ask(server, path)[0] == 404
    assert ask(server, "/", method="POST")[0] == 501


def test_another_host_name_is_refused(server: PageServer) -> None:
    port = server.server_address[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:9000", "localhost", f"[::1]:{port}"):
        assert ask(server, "/data.json", host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "127.0.0.1:80:90"):
        assert ask(server, "/data.json", host=host)[0] == 403, host


def test_strange_queries_get_everything(server: PageServer) -> None:
    for query in ("after=x", "after=-1&version=", "version=0.1&after=1,2,3", "after=%C2%B2"):
        status, found = ask(server, f"/data.json?{query}")
        assert status == 200
        assert json.loads(found)["is_whole"]


def test_a_line_that_is_being_written_waits_for_its_end(run: Path) -> None:
    follower = Follower(run)
    add(run, end='{"step": 6, "lo')
    follower.read()
    assert follower.columns.steps == [1, 2, 3, 4, 5]
    add(run, end='ss": 1.0}\n')
    follower.read()
    assert follower.columns.steps[-1] == 6


def test_old_lines_are_not_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower, parsed = Follower(run), []
    monkeypatch.setattr("fsdp2kit.report.serve.parse_line", lambda line: parsed.append(line) or parse_line(line))
    monkeypatch.setattr("fsdp2kit.report.serve.read_run", lambda *_, **__: None)
    follower.read()
    assert len(parsed) == 5
    add(run, record(6))
    follower.read()
    assert len(parsed) == 6


def test_a_file_that_a_resume_replaced_is_read_anew(run: Path) -> None:
    source = FollowedRuns([run])
    before = source.payload()
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "new").write_text("".join(lines[:3]), encoding="utf-8")
    (run / "new").replace(run / "metrics.jsonl")
    add(run, record(4, start=2, loss=0.5))
    now = source.payload(version=before["version"], after=[5])
    assert now["is_whole"]
    assert now["runs"][0]["step"] == 4
    assert now["runs"][0]["curves"]["loss"]["y"][-1] == 0.5


def test_a_run_that_has_not_logged_yet_is_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", steps=0)
    (run / "metrics.jsonl").unlink()
    source = FollowedRuns([run])
    before = source.payload()
    assert before["runs"][0]["curves"] == {}
    add(run, record(1, start=1))
    assert source.payload(version=before["version"], after=[0])["runs"][0]["step"] == 1


def test_a_taken_port_is_a_mistake(server: PageServer, run: Path) -> None:
    with pytest.raises(UserError, match=r"port \d+: is taken; choose another --port"):
        build_server([run], port=server.server_address[1])


def test_ctrl_c_ends_it_quietly(run: Path) -> None:
    command = [sys.executable, "-m", "tools.report", str(run), "--follow", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
