"""The page in headless Chromium: two widths, light and dark, one run and three, 50 and 50,000 steps, a live one.

It needs Chromium (apt: chromium), node, and the npm packages playwright-core and axe-core where NODE_PATH finds them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.report.page import build_page, write_page
from fsdp2kit.report.read import read_run
from fsdp2kit.report.serve import build_server
from tests.report.helpers import EVENTS, EVIL, record, write_run

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
VIEWS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module", autouse=True)
def _has_browser() -> None:
    if not CHROMIUM or not shutil.which("node"):
        pytest.skip("needs Chromium and node")
    asks = "require.resolve('playwright-core'); require.resolve('axe-core')"
    if subprocess.run(["node", "-e", asks], capture_output=True).returncode:
        pytest.skip("needs playwright-core and axe-core of npm where NODE_PATH finds them")


def look(*jobs: dict[str, Any]) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("browser.js")
    found = subprocess.run(
        ["node", str(script), CHROMIUM], input=json.dumps(jobs), capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def check(seen: dict[str, Any]) -> None:
    """What holds for every page: nothing in the console, nobody is shut out, no text became markup."""
    assert seen["console"] == []
    assert seen["violations"] == []
    assert seen["overflow"] <= 0
    assert seen["seconds"] < 3
    assert seen["charts"] > 8
    assert seen["dragged"]
    assert seen["title"] != "owned"
    keyboard = seen["keyboard"]
    assert keyboard["said"].startswith("step ")
    assert keyboard["zoomed"]
    assert keyboard["whole"]


def grpo(folder: Path) -> Path:
    names = (
        "reward",
        "reward/right",
        "reward/deviation",
        "response_length",
        "entropy",
        "log_prob_gap",
        "seconds/sync",
    )
    return write_run(folder, evaluates=0, also={name: 0.5 + place for place, name in enumerate(names)})


def killed(folder: Path) -> Path:
    run = write_run(folder, events=EVENTS[:6])
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 51, "loss": 0.')
    (run / "metrics.jsonl").touch()
    os.utime(run / "metrics.jsonl", (1.7e9, 1.7e9))
    return run


def long(folder: Path, *, tokens: int) -> Path:
    also = {f"loss/source{place}": math.pi * place for place in range(8)}
    return write_run(folder, steps=50_000, evaluates=500, events=EVENTS, tokens=tokens, also=also)


def pages(folder: Path) -> dict[str, list[Path]]:
    restarted = write_run(folder / "restarted", events=EVENTS, config=f"[wandb]\nnotes = {json.dumps(EVIL)}\n")
    longs = [long(folder / f"long{tokens}", tokens=tokens) for tokens in (250, 500, 1000)]
    plain = write_run(folder / "plain", evaluates=0, also={"my_metric": 2.0})
    return {
        "one": [restarted],
        "three": [restarted, plain, grpo(folder / "rl")],
        "killed": [killed(folder / "killed")],
        "rewards": [grpo(folder / "grpo")],
        "without evaluation": [plain],
        "long": longs[:1],
        "three long": longs,
    }


def test_pages_in_every_view(tmp_path: Path) -> None:
    jobs, names = [], []
    for name, runs in pages(tmp_path).items():
        out = tmp_path / f"{name}.html"
        write_page(build_page([read_run(run) for run in runs]), out)
        assert out.stat().st_size < 3_000_000, name
        jobs += [{"url": out.as_uri(), "width": width, "scheme": scheme} for width, scheme in VIEWS]
        names += [name] * len(VIEWS)
    for name, job, seen in zip(names, jobs, look(*jobs), strict=True):
        print(name, job["width"], job["scheme"], {key: seen[key] for key in ("seconds", "charts", "violations")})
        check(seen)


def test_a_live_page_shows_new_steps_within_five_seconds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", steps=50, events=EVENTS)
    lines = "".join(json.dumps(record(step)) + "\n" for step in range(51, 56))
    with build_server([run], port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            append = [str(run / "metrics.jsonl"), lines]
            job = {"url": server.url, "width": 1280, "scheme": "light", "append": append, "expect": "55 of 50"}
            (seen,) = look(job)
        finally:
            server.shutdown()
            thread.join()
    check(seen)
    assert seen["shown_after"] < 5
