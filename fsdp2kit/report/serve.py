"""A page that follows runs: `serve` answers on 127.0.0.1, and reads of ``metrics.jsonl`` only what is new."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from fsdp2kit.errors import UserError
from fsdp2kit.files.local import open_regular
from fsdp2kit.report.curves import Columns
from fsdp2kit.report.page import as_json, render
from fsdp2kit.report.payload import build_payload
from fsdp2kit.report.read import METRICS, RunRecord, parse_line, read_run

PORT = 8700
IDLE_SECONDS = 10.0
"""How long a connection may stay idle, within a request or before it, until it is closed."""
_LONGEST_STEP = 18  # digits
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_END_BYTES = 1 << 16
"""Of ``metrics.jsonl``, what `read_run` reads to tell how a run stands."""


class Follower:
    """One run, read again and again: `read` takes in the lines that were added since the last call."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.columns = Columns()
        self.generation = 0
        """Counts how often the file was replaced, as it is when a run resumes before its last record."""
        self._place = 0
        self._file: tuple[int, int] | None = None

    def read(self) -> RunRecord:
        """The run as it stands, without its records: those are in ``columns``. `read_run` refuses what is no run."""
        with contextlib.suppress(OSError), open_regular(self.directory / METRICS) as file:
            self._read_lines(file)
        return read_run(self.directory, last_bytes=_END_BYTES)

    def _read_lines(self, file: BinaryIO) -> None:
        found = os.fstat(file.fileno())
        if self._file != (found.st_dev, found.st_ino) or found.st_size < self._place:
            self.generation += self._file is not None
            self._file, self._place, self.columns = (found.st_dev, found.st_ino), 0, Columns()
        file.seek(self._place)
        self.columns.add(self._records(file))

    def _records(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                return
            self._place += len(line)
            if (record := parse_line(line)) is not None:
                yield record


class Source:
    """The payloads of several runs, for one request after the other."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._followers = [Follower(directory) for directory in directories]
        self._lock = threading.Lock()

    def payload(self, *, version: str = "", after: Sequence[int] = ()) -> dict[str, Any]:
        """What is newer than a page of ``version`` up to the steps ``after``; everything if that version is gone."""
        with self._lock:
            runs = [follower.read() for follower in self._followers]
            columns = [follower.columns for follower in self._followers]
            # New metrics need new charts: the page begins anew.
            now = "-".join(f"{one.generation}.{len(one.columns.values)}" for one in self._followers)
            is_newer = version == now and len(after) == len(runs)
            return {**build_payload(runs, columns, after=list(after) if is_newer else None), "version": now}


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer ``/`` and ``/data.json``, and nothing else."""
        host = self.headers.get("Host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if name not in _HOSTS:  # another site's name that was made to lead here
            self.send_error(403, "open this page as http://127.0.0.1")
            return
        asked = urlsplit(self.path)
        if asked.path not in ("/", "/data.json"):
            self.send_error(404)
            return
        try:
            if asked.path == "/":
                self._send(render(self.server.source.payload(), follows=True), "text/html")
            else:
                self._send(as_json(self.server.source.payload(**_seen(asked.query))), "application/json")
        except UserError as problem:  # the directory is gone
            self.send_error(503, explain=str(problem))

    def _send(self, text: str, kind: str) -> None:
        content = text.encode(errors="surrogateescape")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


class Server(ThreadingHTTPServer):
    """Serves the page of ``source`` on 127.0.0.1, reading only."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, source: Source, port: int) -> None:
        self.source = source
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a page that was closed while it was answered, or that takes no more of it."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


def build_server(directories: Sequence[Path], *, port: int) -> Server:
    """A server that is not started yet.

    Args:
        port: 0: any that is free.

    Raises:
        UserError: one of them is no run; the port is taken or not permitted.
    """
    source = Source(directories)
    source.payload()
    try:
        return Server(source, port)
    except (OSError, OverflowError) as problem:
        is_taken = getattr(problem, "errno", None) == errno.EADDRINUSE
        what = "is taken" if is_taken else f"cannot be used ({problem})"
        raise UserError(f"port {port}", what, "choose another --port, or 0 for any that is free") from None


def _seen(query: str) -> dict[str, Any]:
    """What a page says it has: ``version`` and ``after``."""
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    steps = asked.get("after", "").split(",")
    are_steps = all(step.isdecimal() and step.isascii() and len(step) <= _LONGEST_STEP for step in steps)
    after = [int(step) for step in steps] if are_steps else []
    return {"version": asked.get("version", ""), "after": after}
