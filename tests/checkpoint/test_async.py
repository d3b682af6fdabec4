"""Saves beside training: what is written is what was there at the step, and failures are told on every rank."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager

from fsdp2kit.checkpoint.background import BackgroundSave
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.checkpoint.store import CheckpointStore
from fsdp2kit.errors import RunFailure
from fsdp2kit.job.distributed import work_on_this_device
from tests.checkpoint import helpers
from tests.checkpoint.helpers import assert_same, names
from tests.support.workers import WorkerPool


class LateCopies:
    """Every copy of what is saved begins half a second after `save` has returned, or after ten seconds."""

    def __enter__(self) -> LateCopies:
        self.returned, self.has_waited = threading.Event(), True
        original = self.original = DefaultStager._stage

        def late(stager: DefaultStager, *args: Any, **kwargs: Any) -> Any:
            self.has_waited = self.returned.wait(10)
            time.sleep(0.5)
            return original(stager, *args, **kwargs)

        DefaultStager._stage = late
        return self

    def __exit__(self, *_: Any) -> None:
        DefaultStager._stage = self.original


def counting_llama(**options: int) -> Any:
    """A model with a persistent buffer, which each forward pass changes."""
    model = helpers.tiny_llama(**options)
    model.register_buffer("calls", torch.zeros(2))

    def count(*_: Any) -> None:
        model.calls.add_(1)

    model.model.register_forward_pre_hook(count)
    return model


def step_while_saving(run_dir: Path, *, waits: bool) -> tuple[dict, dict, bool]:
    """The state at a save, the state that was saved, and whether `save` returned before the copy was made."""
    model = helpers.sharded(counting_llama())
    optimizer = helpers.adamw(model)
    helpers.train(model, optimizer, range(2))
    at_the_save = helpers.full_state(model, optimizer)
    with LateCopies() as copies, helpers.checkpoints_of(run_dir, model, optimizer, async_save=True) as checkpoints:
        path = checkpoints.save(helpers.progress_at(2))
        copies.returned.set()
        if waits:
            optimizer.register_step_pre_hook(lambda *_: checkpoints.wait_until_staged())
        helpers.train(model, optimizer, range(2, 4))
    resumed = helpers.sharded(counting_llama(seed=1))
    after = helpers.adamw(resumed)
    helpers.checkpoints_of(run_dir, resumed, after).restore(path)
    return at_the_save, helpers.full_state(resumed, after), copies.has_waited


def test_what_is_saved_are_the_values_of_the_step(pool: WorkerPool, tmp_path: Path) -> None:
    for expected, saved, returned in pool.run(2, step_while_saving, tmp_path / "run", waits=True):
        assert_same(expected, saved)
        assert (saved["calls"] > 0).all(), "the forward passes before the save are counted"
        assert returned, "save returned before the copy was made"
    [(expected, saved, _), _] = pool.run(2, step_while_saving, tmp_path / "other", waits=False)
    with pytest.raises(AssertionError):  # so the comparison would have shown it
        assert_same(expected, saved)


def two_saves(run_dir: Path) -> tuple[str, list[bool]]:
    model = helpers.sharded(helpers.tiny_llama())
    optimizer = helpers.adamw(model)
    with helpers.checkpoints_of(run_dir, model, optimizer, keep=1, async_save=True) as checkpoints:
        first = checkpoints.save(helpers.progress_at(1))
        checkpoints.wait_until_staged()
        helpers.train(model, optimizer, range(1))
        checkpoints.save(helpers.progress_at(2))  # waits for the first
        dist.barrier()
        was_there = (first / "manifest.json").exists() or not (first.with_name(".tmp-step-000001")).exists()
    return verify(run_dir / "checkpoints" / "step-000002"), [was_there, first.exists()]


def test_a_save_waits_for_the_one_before_and_the_end_for_the_last(pool: WorkerPool, tmp_path: Path) -> None:
    for found, (was_published, is_left) in pool.run(2, two_saves, tmp_path):
        assert "whole: step 2" in found
        assert was_published
        assert not is_left


def failing_save(run_dir: Path) -> tuple[str, str, bool]:
    """A save that only rank 0 can know to fail: what finish says, what the context says, whether it was noticed."""
    model = helpers.sharded(helpers.tiny_llama())
    checkpoints = helpers.checkpoints_of(run_dir, model, async_save=True, write_assets=helpers.disk_is_full)
    said = []
    for finish in (checkpoints.finish_save, checkpoints.finish):
        checkpoints.save(helpers.progress_at(1))
        deadline = time.monotonic() + 30
        while not checkpoints.has_failed() and time.monotonic() < deadline:
            time.sleep(0.01)
        noticed = checkpoints.has_failed()
        with pytest.raises(RunFailure) as failure:
            finish()
        said.append(str(failure.value))
    return said[0], said[1], noticed


def test_a_failure_is_told_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    for first, second, noticed in pool.run(2, failing_save, tmp_path):
        assert noticed
        assert first == second
        assert "step-000001: the checkpoint was not saved" in first
        assert "No space left on device" in first
    assert names(tmp_path) == []


def test_an_error_of_the_run_is_not_hidden_by_one_of_a_save(tmp_path: Path, caplog) -> None:
    checkpoints = helpers.checkpoints_of(tmp_path, async_save=True, write_assets=helpers.disk_is_full)

    def run() -> None:
        with checkpoints:
            checkpoints.save(helpers.progress_at(1))
            raise ValueError("of the run")

    with pytest.raises(ValueError, match="of the run"):
        run()
    assert "No space left on device" in caplog.text


def test_deletion_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_delete = threading.Event()
    sweep = CheckpointStore.sweep
    monkeypatch.setattr(CheckpointStore, "sweep", lambda self: may_delete.wait(30) and sweep(self))
    checkpoints = helpers.checkpoints_of(tmp_path, keep=1)
    for step in (1, 2, 3):
        checkpoints.save(helpers.progress_at(step))
    assert names(tmp_path) == [".trash-step-000001", ".trash-step-000002", "step-000003"]
    may_delete.set()
    checkpoints.finish()
    assert names(tmp_path) == ["step-000003"]


def test_the_saving_thread_works_on_the_ranks_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts on device 0, where DCP's writer would wait for a stream, and make a context for it."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(current, "index", index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "index", 0))
    torch.cuda.set_device(3)
    with monkeypatch.context() as has_device:
        has_device.setattr(torch.cuda, "is_available", lambda: True)
        begin = work_on_this_device()
    monkeypatch.setattr("fsdp2kit.checkpoint.background.work_on_this_device", lambda: begin)
    assert BackgroundSave()._writer.submit(torch.cuda.current_device).result() == 3


def test_a_failure_is_told_once_and_waiting_is_counted_save_by_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is looked at."""
    save, now = BackgroundSave(), itertools.count()
    monkeypatch.setattr("fsdp2kit.checkpoint.background.time", SimpleNamespace(monotonic=lambda: float(next(now))))

    def fail(tensors: Any, number: int) -> None:
        raise RuntimeError(f"save {number}")

    for number in (1, 2):
        save.begin({"model": {"x": torch.ones(2)}}, fail, number)
        assert save.waited == 1.0
        with pytest.raises(RuntimeError, match=f"save {number}"):
            save.finish()
        assert save.waited == 2.0
        assert not save.has_failed()
        save.finish()
        save.wait_until_staged()
        assert save.waited == 2.0
