"""TensorBoard and MLflow: their own readers find what metrics.jsonl has; their errors never stop a run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp2kit.config.checks import check_config
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.progress import Progress
from fsdp2kit.train.trackers import Guarded, Mlflow, start_trackers
from tests.train.helpers import build

VALUES = {"recipe": "none", "model": {"config": {"model_type": "llama"}, "weights": "random"}, "train": {"steps": 1}}
SAMPLES = [{"prompt": "Wet?", "answer": "Yes, and rain."}]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of MLflow's; those that a test sets are gone after it."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        del os.environ[name]


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 3.0 / step, "loss/a, b": 0.5, "mfu": None, "tokens": 10 * step, **more}


def train_twice(run_dir: Path, *, resume_step: int, **sections: Any) -> list[dict[str, Any]]:
    """Steps 1 to 3, then from ``resume_step`` on to 5, where the loss of step 3 may be another; metrics.jsonl."""
    run_dir.mkdir()
    for start, last, by in ((0, 3, 1.0), (resume_step, 5, 2.0)):
        metrics = build(run_dir, resume_step=start, sections=sections)
        for step in range(start + 1, last + 1):
            metrics.log(record(step, grad_norm=by))
        metrics.log_samples(last, SAMPLES)
        metrics.close(ok=True)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curve(records: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(one["step"], one[key]) for one in records]


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = train_twice(tmp_path / "run", resume_step=2, tensorboard={"enabled": True})
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == ["loss", "loss/a, b", "tokens", "grad_norm"]
    for key in found.Tags()["scalars"]:
        shown = [(event.step, event.value) for event in found.Scalars(key)]
        assert [step for step, _ in shown] == [1, 2, 3, 4, 5]
        assert shown == [(step, pytest.approx(value)) for step, value in curve(records, key)]
    (*_, text) = found.Tensors("samples/text_summary")
    assert text.step == 5
    assert b"**Wet?**\n\nYes, and rain." in text.tensor_proto.string_val[0]


def test_a_run_from_the_start_again_replaces_what_tensorboard_shows(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_twice(tmp_path / "run", resume_step=0, tensorboard={"enabled": True})
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("grad_norm")] == [(n, 2.0) for n in range(1, 6)]


@pytest.mark.full
def test_mlflow_continues_its_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The real client, into the store beside the run, which has no other name than the run directory's."""
    import mlflow

    section = {"enabled": True, "experiment": "try"}
    records = train_twice(tmp_path / "run", resume_step=2, mlflow=section)
    said, complained = capfd.readouterr()
    assert (complained, "mlflow: " in said) == ("", False)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("try").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["mlflow.experiment"] == "try"
    assert run.data.params["train.global_batch_size"] == "8"
    for key in ("loss", "loss/a, b", "tokens"):
        history = client.get_metric_history(run.info.run_id, key.replace(",", "_"))
        assert [(one.step, one.value) for one in history] == curve(records, key)
    # Step 3 was there already, and MLflow deletes nothing.
    history = client.get_metric_history(run.info.run_id, "grad_norm")
    assert [(one.step, one.value) for one in history] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    (samples,) = (tmp_path / "mlflow-artifacts").rglob("step-000005.md")
    assert samples.read_text() == "**Wet?**\n\nYes, and rain."
    # A store that does not have the run, as after another MLFLOW_TRACKING_URI, begins one.
    (tmp_path / "run" / "mlflow-run").write_text("0" * 32)
    metrics = build(tmp_path / "run", resume_step=5, sections={"mlflow": section})
    metrics.log(record(6))
    metrics.close(ok=False)
    newest, _ = client.search_runs([run.info.experiment_id])
    assert (newest.info.status, newest.data.metrics["loss"]) == ("FAILED", 0.5)


@pytest.mark.full
def test_a_server_that_cannot_be_reached_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = "http://me:hidden@127.0.0.1:9"
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    metrics = build(tmp_path, sections={"mlflow": {"enabled": True}})
    metrics.log(record(1))
    metrics.close(ok=True)
    said, complained = capfd.readouterr()
    line, *_ = said.splitlines()
    assert line.startswith("mlflow: MlflowException: ")
    assert line.endswith("it is off for this run, and metrics.jsonl has everything")
    assert "mlflow: " not in said.removeprefix(line)
    assert "hidden" not in said + complained


class Broken:
    """A tracker that fails from its second record on."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def log(self, record: Any) -> None:
        self.calls.append(f"log {record['step']}")
        if record["step"] > 1:
            raise ConnectionError("the service is gone\nwith a long story")

    def log_samples(self, step: int, samples: Any) -> None:
        self.calls.append(f"samples {step}")

    def close(self, ok: bool) -> None:
        self.calls.append(f"close {ok}")


def test_a_failure_amid_the_run_is_told_once() -> None:
    said: list[str] = []
    broken = Broken()
    tracker = Guarded("mine", lambda: broken, said.append)
    for step in (1, 2, 3):
        tracker.log({"step": step})
        tracker.log_samples(step, SAMPLES)
    tracker.close(ok=True)
    assert broken.calls == ["log 1", "samples 1", "log 2"]
    assert said == [
        "mine: ConnectionError: the service is gone; it is off from here on, and metrics.jsonl has everything"
    ]


class Client:
    """Stands in for MLflow's: its server takes a run's first batch of figures, after the parameters, and no other."""

    def __init__(self, uri: str) -> None:
        self.batches = 0

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="0")

    def create_run(self, experiment: str, run_name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="1"))

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        self.batches += len(metrics) > 0
        if self.batches > 1:
            raise ConnectionError("no answer")


def test_what_fails_in_the_background_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    monkeypatch.setattr(mlflow, "MlflowClient", Client)
    metrics = build(tmp_path, sections={"mlflow": {"enabled": True}})
    for step in (1, 2, 3, 4):
        metrics.log({"step": step, "loss": 1.0})
    metrics.close(ok=True)
    said = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("step")]
    assert said == ["mlflow: ConnectionError: no answer; it is off from here on, and metrics.jsonl has everything"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("section", "package", "command"),
    [
        ("tensorboard", "tensorboard", "pip install 'tensorboard>=2.20'"),
        ("mlflow", "mlflow", "pip install 'mlflow-skinny>=3.17' 'sqlalchemy>=2' alembic"),
        ("mlflow", "alembic", "pip install 'mlflow-skinny>=3.17' 'sqlalchemy>=2' alembic"),
    ],
)
def test_a_missing_extra_is_refused_before_the_run(
    section: str, package: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    check_config(TrainingConfig.model_validate(VALUES), world_size=1, local_world_size=1)
    config = TrainingConfig.model_validate({**VALUES, section: {"enabled": True}})
    with pytest.raises(UserError) as refusal:
        check_config(config, world_size=1, local_world_size=1)
    what = f"{section}.enabled: needs {package}, which is not installed; install it: {command}"
    assert str(refusal.value) == what


def test_a_server_needs_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    os.environ["MLFLOW_TRACKING_URI"] = "https://mlflow.mine.org"
    config = TrainingConfig.model_validate({**VALUES, "mlflow": {"enabled": True}})
    check_config(config, world_size=1, local_world_size=1)


def test_without_keys_there_is_only_wandb(tmp_path: Path) -> None:
    config = TrainingConfig.model_validate({"recipe": "none", "wandb": {"mode": "disabled"}})
    trackers, wandb_id = start_trackers(config, run_dir=tmp_path, progress=Progress(wandb_id="x1"), message=print)
    assert (len(trackers), wandb_id) == (1, "x1")
    assert list(tmp_path.iterdir()) == []


def test_mlflow_keeps_what_was_logged_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run does not log again the steps that the server has."""
    sent: list[Any] = []
    entities = SimpleNamespace(Metric=lambda name, value, now, step: (name, value, step))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    tracker: Any = object.__new__(Mlflow)
    tracker._client = SimpleNamespace(
        log_batch=lambda run, metrics: sent.append((run, metrics)),
        log_text=lambda run, text, place: sent.append((run, text, place)),
    )
    tracker._id, tracker._last, tracker._send = "run", 3, lambda call: call()
    for step in (3, 4):
        tracker.log({**record(step), "name": "text"})
        tracker.log_samples(step, SAMPLES)
    metrics = [("loss", 0.75, 4), ("loss/a_ b", 0.5, 4), ("tokens", 40.0, 4)]
    assert sent == [("run", metrics), ("run", "**Wet?**\n\nYes, and rain.", "samples/step-000004.md")]
