"""One HTML file with everything in it: template, styles, scripts and the payload. It asks no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from fsdp2kit.errors import UserError
from fsdp2kit.files.local import replace_file
from fsdp2kit.report.payload import build_payload
from fsdp2kit.report.read import RunRecord

_ASSETS = Path(__file__).with_name("assets")
_MARK = '<meta name="generator" content="fsdp2kit report">'


def build_page(runs: Sequence[RunRecord]) -> str:
    """The page of one run, or of several over each other, as HTML."""
    return render(build_payload(runs))


def render(payload: Mapping[str, Any], *, follows: bool = False) -> str:
    """The page that shows a payload.

    Only these scripts and styles may run on it, by their digests: text of a run is never code.

    Args:
        follows: it asks ``data.json`` beside it for what is new.
    """
    styles = [_asset("uPlot.min.css"), _asset("page.css")]
    scripts = [_asset("uPlot.iife.min.js"), _asset("page.js")]
    policy = [
        "default-src 'none'",
        f"script-src {_digests(scripts)}",
        f"style-src {_digests(styles)}",
        "connect-src 'self'" if follows else "connect-src 'none'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    title = ", ".join(run["name"] for run in payload["runs"])
    return Template(_asset("page.html")).substitute(
        mark=_MARK,
        policy=html.escape("; ".join(policy), quote=True).replace("&#x27;", "'"),
        title=html.escape(title),
        styles="".join(f"<style>{text}</style>\n" for text in styles),
        scripts="".join(f"<script>{text}</script>\n" for text in scripts),
        payload=as_script(payload),
        follows="true" if follows else "false",
    )


def as_script(payload: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: no text in it ends the element or begins a comment."""
    return as_json(payload).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def as_json(payload: Mapping[str, Any]) -> str:
    """JSON as a browser reads it: null for numbers that are not finite, and half characters escaped."""
    try:
        return json.dumps(payload, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare: a figure of a plan or a save
        return json.dumps(_finite(payload), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_page(text: str, out: Path, *, force: bool = False) -> None:
    """Write a page. A page of an earlier call is replaced, another file only with ``force``.

    Raises:
        UserError: there is another file, or it cannot be written.
    """
    try:
        if out.exists() and not out.is_file():  # a pipe would be waited for
            raise UserError(str(out), "is there, and is no file", "choose another --out")
        if out.exists() and not force and not is_page(out):
            raise UserError(
                str(out), "is there, and was not written by this command", "choose another --out, or --force"
            )
        replace_file(out, text)
    except OSError as problem:
        what = f"cannot be written ({problem.strerror or problem})"
        raise UserError(str(out), what, "choose another --out") from None


def is_page(path: Path) -> bool:
    """Whether a file is a page of `write_page`."""
    with path.open("rb") as file:
        return _MARK.encode() in file.read(2000)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _digests(texts: Sequence[str]) -> str:
    found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in found)
