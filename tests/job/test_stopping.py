"""Asked to stop in any phase, a run ends soon with a checkpoint, and then goes on as if it had not been asked."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.config.sections.weight_sync import WeightSyncConfig
from fsdp2kit.job import launcher, stop
from fsdp2kit.job.stop import Stopped, UnsavedStart
from fsdp2kit.report.read import read_run
from fsdp2kit.rl.engines.server import RolloutServer
from tests.support.models import full
from tests.support.runs import DEMO
from tests.support.short_run import TOML
from tests.support.workers import ending, start_ranks

ROOT = Path(__file__).resolve().parents[2]
SOON = 60  # seconds: it takes 2, on a machine that does nothing else; each phase below lasts longer

# A recipe in which one function is slow from its n-th call on, and says so in a file.
RECIPE = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import recipes.{recipe} as base
{imports}
Config = base.Config

def slow(owner, name, seconds, first):
    real, calls = getattr(owner, name), []
    def slowed(*arguments, **options):
        calls.append(name)
        if len(calls) >= first:
            Path({marker!r}).touch()
            time.sleep(seconds)
        return real(*arguments, **options)
    setattr(owner, name, slowed)

def main(config):
    if {is_slow}:
        slow({owner}, {name!r}, {seconds}, {first})
    base.main(config)
"""
# Phase: module, what is slow in it, seconds of a call, its first slow call.
PHASES: dict[str, tuple[str, str, float, int]] = {
    "reading data": ("base", "build_data", 200, 1),
    "loading weights": ("fsdp2kit.checkpoint.checkpoints", "fill_weights", 200, 1),
    "the first step": ("base", "cross_entropy", 200, 1),
    "a step": ("base", "cross_entropy", 0.3, 4),
    "evaluating": ("fsdp2kit.train.evaluation.Evaluation", "_sums_of", 0.7, 3),
    "the last evaluation": ("fsdp2kit.train.evaluation.Evaluation", "_sums_of", 0.7, 10),
    "answering prompts": ("fsdp2kit.train.evaluation", "reduce_numbers", 0.7, 3),
    "saving": ("fsdp2kit.checkpoint.checkpoints.Checkpoints", "write", 2, 1),
    "exporting": ("fsdp2kit.checkpoint.hf", "write_safetensors", 2, 1),
    "generating": ("fsdp2kit.rl.engines.transformers_engine._Sampler", "__call__", 1, 20),
    "finding rewards": ("fsdp2kit.rl.user_code.UserProcess", "has_answer", 0.3, 4),
    "syncing weights": ("fsdp2kit.rl.engines.transformers_engine.TransformersEngine", "load_weights", 1, 3),
}
OF_GRPO = ("generating", "finding rewards", "syncing weights")
EVALUATED = ["eval.every=2", "eval.patience=9", "checkpoint.every=3", "train.steps=4"]


def write(folder: Path, phase: str, *, is_slow: bool) -> Path:
    """Write recipe and TOML of a run."""
    owner, name, seconds, first = PHASES[phase]
    module = ".".join(part for part in owner.split(".") if part.islower() and not part.startswith("_"))
    recipe = "grpo" if phase in OF_GRPO else "sft"
    text = RECIPE.format(
        root=str(ROOT),
        recipe=recipe,
        imports="" if owner == "base" else f"import {module}",
        marker=str(folder / "begun"),
        is_slow=is_slow,
        owner=owner,
        name=name,
        seconds=seconds,
        first=first,
    )
    (folder / "own.py").write_text(text)
    grpo = (DEMO.parent / "grpo_demo.toml").read_text().replace('"demo/', f'"{DEMO}/')
    toml = grpo if recipe == "grpo" else TOML
    (folder / "run.toml").write_text(toml.replace(f'recipe = "{recipe}"', 'recipe = "own.py"'))
    return folder / "run.toml"


def options(phase: str) -> list[str]:
    if phase in OF_GRPO:
        small = ["train.global_batch_size=32", "train.micro_batch_size=8", "rollout.max_new_tokens=8", "mesh.cp=1"]
        return [*EVALUATED, *small]
    prompts = ['eval.prompts=["What is this?"]', "eval.max_new_tokens=20"] if phase == "answering prompts" else []
    return [*EVALUATED, f"eval.path='{DEMO / 'heldout.jsonl'}'", *prompts]


def run(folder: Path, command: list[str], ranks: int, *, number: signal.Signals | None, to: list[int]) -> str:
    """Run to the end, or send a signal once the slow phase has begun. Returns what rank 0 said; all exit with 0."""
    logs = folder / f"logs-{len(list(folder.glob('logs-*')))}"
    logs.mkdir()
    processes, paths = start_ranks(ranks, logs, "fsdp2kit.run", *command)
    with ending(processes):
        deadline = time.monotonic() + 240
        while number and not (folder / "begun").exists() and processes[0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not number or (folder / "begun").exists(), "".join(path.read_text() for path in paths)
        if number:
            for rank in to:
                os.kill(processes[rank].pid, number)
        for process in processes:
            process.join(SOON if number else 240)
        said = "".join(path.read_text() for path in paths)
        assert [process.exitcode for process in processes] == [0] * ranks, said
    assert "Traceback" not in said
    assert "error: " not in said
    return said


def figures(run_dir: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "tokens_total", "eval_loss", "reward")
    return [tuple(line.get(key) for key in keys) for line in lines]


CASES = [
    ("evaluating", 1, signal.SIGINT, [0]),
    pytest.param("evaluating", 2, signal.SIGHUP, [1], marks=pytest.mark.slow),
    full("reading data", 2, signal.SIGTERM, [0, 1]),
    pytest.param("loading weights", 2, signal.SIGINT, [0], marks=pytest.mark.slow),
    pytest.param("the first step", 2, signal.SIGTERM, [1], marks=pytest.mark.slow),
    full("a step", 2, signal.SIGUSR1, [1]),
    pytest.param("the last evaluation", 2, signal.SIGTERM, [0, 1], marks=pytest.mark.slow),
    pytest.param("answering prompts", 2, signal.SIGINT, [0, 1], marks=pytest.mark.slow),
    full("saving", 2, signal.SIGTERM, [0, 1]),
    full("exporting", 2, signal.SIGTERM, [0, 1]),
    full("generating", 2, signal.SIGTERM, [1]),
    pytest.param("finding rewards", 2, signal.SIGINT, [0, 1], marks=pytest.mark.slow),
    pytest.param("syncing weights", 2, signal.SIGTERM, [0], marks=pytest.mark.slow),
    pytest.param("reading data", 1, signal.SIGINT, [0], marks=pytest.mark.slow),
    pytest.param("the first step", 1, signal.SIGTERM, [0], marks=pytest.mark.slow),
    pytest.param("generating", 1, signal.SIGHUP, [0], marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The run directory of a run that is not asked to stop; phases with the same options share one."""
    known: dict[tuple[str, ...], Path] = {}

    def get(phase: str, ranks: int) -> Path:
        key = (str(ranks), str(phase in OF_GRPO), *options(phase))
        if key not in known:
            folder = tmp_path_factory.mktemp("straight")
            command = [str(write(folder, phase, is_slow=False)), f"run.dir={folder / 'run'}", *options(phase)]
            run(folder, command, ranks, number=None, to=[])
            known[key] = folder / "run"
        return known[key]

    return get


@pytest.mark.parametrize(("phase", "ranks", "number", "to"), CASES)
def test_a_run_that_is_asked_to_stop_goes_on_as_if_it_had_not_been(
    phase: str,
    ranks: int,
    number: signal.Signals,
    to: list[int],
    straight: Callable[[str, int], Path],
    tmp_path: Path,
) -> None:
    asked = tmp_path / "run"
    command = [str(write(tmp_path, phase, is_slow=True)), f"run.dir={asked}", *options(phase)]

    said = run(tmp_path, command, ranks, number=number, to=to)

    found = re.search(r"asked to stop \(.*\) after step (\d+)", said)
    step = int(found[1]) if found else 4 if phase == "exporting" else 0
    assert (step == 0) == (phase in ("reading data", "loading weights", "the first step"))
    assert f"asked to stop ({number.name}) in " in said
    record = read_run(asked)
    assert record.state == "stopped"
    assert number.name in record.message
    kept = sorted(path.name for path in (asked / "checkpoints").glob("step-*"))
    assert kept[-1:] == ([f"step-{step:06d}"] if step else [])
    if step:
        assert f"whole: step {step}," in verify(asked / "checkpoints" / kept[-1])
    assert not [*(asked / "errors").glob("*")]
    if "evaluati" in phase:
        assert [line[0] for line in figures(asked)] == list(range(1, step)), "the step is logged with its evaluation"

    write(tmp_path, phase, is_slow=False)
    run(tmp_path, command, ranks, number=None, to=[])
    expected = straight(phase, ranks)
    assert figures(asked) == figures(expected)
    assert len(figures(asked)) == 4
    assert (asked / "hf" / "model.safetensors").read_bytes() == (expected / "hf" / "model.safetensors").read_bytes()


def launch(folder: Path, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    """``fsdp2kit run --nproc 2``, in a session of its own, and where its output goes."""
    command = [sys.executable, "-m", "fsdp2kit", "run", str(folder / "run.toml"), "--nproc", "2", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        ), folder / "log"


@pytest.mark.slow
def test_ctrl_c_in_an_evaluation_of_launched_ranks_prints_no_traceback(tmp_path: Path) -> None:
    write(tmp_path, "evaluating", is_slow=True)
    process, log = launch(tmp_path, f"run.dir={tmp_path / 'run'}", *options("evaluating"))
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "begun").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON) == 0, log.read_text()
    finally:
        process.kill()
    said = log.read_text()
    assert "asked to stop (SIGINT) after step 2" in said
    assert "Traceback" not in said
    assert "error" not in said
    assert read_run(tmp_path / "run").state == "stopped"


@pytest.mark.slow
def test_a_mistake_on_launched_ranks_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, "evaluating", is_slow=False)
    process, log = launch(tmp_path, "trian.steps=3")
    assert process.wait(240) == 2
    [line] = log.read_text().splitlines()
    assert line.startswith("error: override trian: unknown section or key")


@pytest.mark.full
def test_a_bug_on_a_launched_rank_is_one_traceback(tmp_path: Path) -> None:
    write(tmp_path, "evaluating", is_slow=False)
    text = (tmp_path / "own.py").read_text().replace("if False:", "if __import__('os').environ['RANK'] == '1':")
    (tmp_path / "own.py").write_text(text.replace("time.sleep(seconds)", "raise ValueError('a bug')"))
    process, log = launch(tmp_path, f"run.dir={tmp_path / 'run'}", *options("evaluating"))
    assert process.wait(240) == 1
    said = log.read_text()
    assert said.count("Traceback") == 1
    assert "ValueError: a bug" in said
    assert "ChildFailedError" not in said


def test_exit_codes_of_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.exit_code_of({}, interrupted=False) == 0
    assert launcher.exit_code_of({0: 2, 1: 2}, interrupted=False) == 2
    assert launcher.exit_code_of({0: -signal.SIGTERM, 1: 2}, interrupted=False) == 2
    assert launcher.exit_code_of({1: 1, 0: -signal.SIGTERM}, interrupted=False) == 1
    assert launcher.exit_code_of({0: 130, 1: 130}, interrupted=True) == 130
    assert capsys.readouterr().err == ""
    assert launcher.exit_code_of({1: -signal.SIGKILL}, interrupted=False) == 1
    assert "error: fsdp2kit run: rank 1 was ended by SIGKILL; " in capsys.readouterr().err


def test_a_hang_up_asks_to_stop_unless_it_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    former = signal.getsignal(signal.SIGHUP)
    try:
        for handler, heard in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
            signal.signal(signal.SIGHUP, handler)
            with stop.listening() as request:
                signal.raise_signal(signal.SIGHUP)
                assert request.requested is heard
            assert signal.getsignal(signal.SIGHUP) is handler
            assert ("asked to stop (SIGHUP)" in capsys.readouterr().out) is heard
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_request_is_acknowledged_while_the_main_thread_is_in_one_call(capfd: pytest.CaptureFixture[str]) -> None:
    """Python runs no handler then: `ctypes` calls C's own sleep, as a collective waits."""
    with stop.listening() as request:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        said: list[str] = []
        threading.Timer(1.5, lambda: said.append(capfd.readouterr().out)).start()
        held = ctypes.CDLL(None).nanosleep
        for _ in range(2):  # the signal ends the first one early
            held((ctypes.c_long * 2)(1, 0), None)
        time.sleep(0.5)
        assert request.reason == "SIGTERM"
    assert "asked to stop (SIGTERM) in " in said[0]


def test_until_the_first_step_one_rank_is_left_by_an_exception() -> None:
    def start() -> None:
        with stop.running(ends_process=False):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    with pytest.raises(Stopped):
        start()
    with stop.running(ends_process=False) as request:
        stop.begin_to_change()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert request.requested
        with pytest.raises(Stopped):
            stop.check()


def test_a_rank_that_agreed_to_end_goes_on_where_another_trains() -> None:
    start = UnsavedStart(ends_process=True)
    assert start.agree_to_end()
    threading.Timer(0.2, start.go_on).start()
    start.begin_to_change()
    assert not start.agree_to_end()


class _Slow(RolloutServer):
    kind = missing = "slow"

    def _served_model(self) -> str:
        return "model"


def test_a_request_to_a_server_is_broken_off() -> None:
    """The server sees that its client has gone, and does not generate any further."""
    section: Any = SimpleNamespace(sleep=False)
    with socket.create_server(("127.0.0.1", 0)) as listener, stop.listening():
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        known: Any = {"run": "r", "is_main": True, "stops": (), "timeout": 600.0, "weight_sync": WeightSyncConfig()}
        server = _Slow(section, url, **known)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Stopped):
            server._post("v1/completions", is_long=True)
        with listener.accept()[0] as client:
            client.settimeout(20)
            while client.recv(4096):
                pass
        with pytest.raises(Stopped):
            server._post("v1/completions", is_long=True)


def test_the_time_limit_of_an_inner_block_ends_with_it() -> None:
    with stop.listening(max_minutes=60) as outer:
        with stop.listening(max_minutes=-1) as inner:
            assert inner.reason == "run.max_minutes"
            inner.lift_time_limit()
            assert not inner.requested
        with stop.listening(max_minutes=-1):
            pass
        assert outer.reason is None


def test_a_request_to_another_rank_is_this_ranks_too_and_does_not_replace_its_own() -> None:
    for own, expected in ((None, "SIGTERM on rank 3"), ("SIGUSR1", "SIGUSR1")):
        called: list[str] = []
        with stop.listening() as request:
            request.received = own
            stop.hear_of("SIGTERM on rank 3")
            assert (request.reason, request.is_told) == (expected, own is None)
            stop.when_asked(partial(called.append, "at once"))
        assert called[0] == "at once"


@pytest.mark.parametrize(
    ("is_gone", "received", "minutes", "ends_process", "expected"),
    [
        (True, "SIGTERM", -1, False, "SIGTERM"),
        (True, None, -1, False, "torchrun has ended"),
        (True, None, 60, True, None),
        (True, None, -1, True, "run.max_minutes"),
        (False, None, None, False, None),
    ],
)
def test_which_of_several_reasons_is_named(
    is_gone: bool, received: str | None, minutes: float | None, ends_process: bool, expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(stop, "launcher_is_gone", lambda: is_gone)
    with stop.listening(max_minutes=minutes, start=UnsavedStart(ends_process=ends_process)) as request:
        request.received = received
        assert request.reason == expected
        request.received = None


def test_a_start_ends_the_process_until_it_has_something_to_save() -> None:
    start = UnsavedStart(ends_process=True)
    assert start.agree_to_end()
    start.go_on()
    trains, never = UnsavedStart(ends_process=True), UnsavedStart()
    trains.begin_to_change()
    assert not trains.agree_to_end()
    assert not never.agree_to_end()


@pytest.mark.parametrize(("value", "is_first"), [(None, True), ("0", True), ("", True), ("1", False), ("10", False)])
def test_the_first_rank_of_a_host_speaks_for_it(
    value: str | None, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCAL_RANK", value)
    assert stop.is_first_local_rank() is is_first


def test_a_last_word_is_called_within_its_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(os, "_exit", lambda code: said.append(f"exit {code}"))

    def fail() -> None:
        raise ValueError

    with stop.last_word(fail), stop.last_word(lambda: said.append("word")):
        stop.leave()
    stop.leave()
    assert said == ["word", "exit 0", "exit 0"]


def test_a_launcher_passes_signals_on_and_kills_after_a_second_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come before the ranks are there wait for them; a rank that has ended gets none."""
    now, sent = 100.0, []

    def kill(pid: int, number: int) -> None:
        if pid == 7:
            raise ProcessLookupError
        sent.append((pid, signal.Signals(number).name))

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(launcher.os, "kill", kill)
    monkeypatch.setattr(launcher.signal, "signal", lambda number, handler: None)
    signals: Any = launcher._Signals()
    signals._send(signal.SIGUSR1, None)
    signals.go_to(SimpleNamespace(pids=lambda: {0: 7, 1: 8}))
    for seconds in (0.0, 11.0, 9.9, 0.1):
        now += seconds
        signals.end_if_interrupted()
        if seconds in (0.0, 11.0):
            signals._send(signal.SIGINT, None)
    assert sent == [(8, name) for name in ("SIGUSR1", "SIGINT", "SIGINT", "SIGKILL")]
