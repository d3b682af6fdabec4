"""Trackers: where a run's records go besides the console and its files. Their errors never stop a run."""

from __future__ import annotations

import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.files.local import read_text, replace_file
from fsdp2kit.files.redaction import cleaned
from fsdp2kit.job.events import flat
from fsdp2kit.job.progress import Progress
from fsdp2kit.train.wandb_run import brief, start_wandb


class Tracker(Protocol):
    """What `fsdp2kit.train.metrics.Metrics` calls of a tracker."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Log one record under its ``step``."""
        ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log prompts and answers as text."""
        ...

    def close(self, ok: bool) -> None:
        """Finish, as failed unless ``ok``."""
        ...


def start_trackers(
    config: TrainingConfig, *, run_dir: Path, progress: Progress, message: Callable[[str], None]
) -> tuple[list[Tracker], str | None]:
    """Start the trackers that ``config`` asks for, or continue their runs; one that fails says so and is off.

    Args:
        progress: where the run starts.
        message: called with a line for the user.

    Returns:
        The trackers, and the id of wandb's run for the checkpoint.
    """
    values = config.model_dump(mode="json")
    wandb = start_wandb(config.wandb, run_dir=run_dir, config=values, wandb_id=progress.wandb_id, message=message)
    starts: dict[str, Callable[[], Tracker]] = {}
    if config.tensorboard.enabled:
        starts["tensorboard"] = partial(TensorBoard, run_dir / "tensorboard", step=progress.step)
    if config.mlflow.enabled:
        experiment = config.mlflow.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fsdp2kit"
        starts["mlflow"] = partial(Mlflow, experiment, run_dir=run_dir, step=progress.step, config=cleaned(values))
    return [wandb, *(Guarded(name, start, message) for name, start in starts.items())], wandb.id


class Guarded:
    """A tracker whose first error is told and switches it off; its methods raise none of the tracker's errors."""

    def __init__(self, name: str, start: Callable[[], Tracker], message: Callable[[str], None]) -> None:
        self._name, self._message = name, message
        self._tracker: Tracker | None = None
        try:
            self._tracker = start()
        except Exception as error:  # an outage, a refused login, a full disk, a broken installation
            self._switch_off(error, "for this run")

    def log(self, record: Mapping[str, Any]) -> None:
        self._attempt(lambda tracker: tracker.log(record))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._attempt(lambda tracker: tracker.log_samples(step, samples))

    def close(self, ok: bool) -> None:
        self._attempt(lambda tracker: tracker.close(ok))
        self._tracker = None

    def _attempt(self, call: Callable[[Tracker], object]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:
            self._switch_off(error, "from here on")

    def _switch_off(self, error: Exception, since: str) -> None:
        self._tracker = None
        self._message(f"{self._name}: {brief(error)}; it is off {since}, and metrics.jsonl has everything")


class TensorBoard:
    """Event files in a directory. Steps that a resumed run repeats replace those of the earlier attempt.

    Args:
        step: that the run resumes after; 0 replaces all that the directory shows.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0, flush_secs=10)

    def log(self, record: Mapping[str, Any]) -> None:
        for key, value in _numbers(record).items():
            self._writer.add_scalar(key, value, record["step"])

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._writer.add_text("samples", _text(samples), step)

    def close(self, ok: bool) -> None:
        self._writer.close()


class Mlflow:
    """A run of MLflow. Steps that a resumed run repeats keep what was logged first, since MLflow deletes nothing.

    Records are sent in the background; an error is raised by the next call.

    Args:
        step: that the run resumes after; 0 begins another run of MLflow.
        config: logged as parameters, without secrets.
    """

    def __init__(self, experiment: str, *, run_dir: Path, step: int, config: Mapping[str, Any]) -> None:
        home, kept = run_dir.resolve().parent, run_dir / "mlflow-run"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = client = _connect(uri or f"sqlite:///{home / 'mlflow.db'}")
        self._thread, self._sent = ThreadPoolExecutor(1, "fsdp2kit-mlflow"), Future()
        self._sent.set_result(None)
        self._last = -1
        if step and kept.is_file() and self._continue(read_text(kept).strip()):
            return
        from mlflow.entities import Param

        place = None if uri else (home / "mlflow-artifacts").as_uri()
        found = client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else client.create_experiment(experiment, artifact_location=place)
        self._id = client.create_run(number, run_name=run_dir.resolve().name).info.run_id
        replace_file(kept, self._id)
        parameters = [Param(_name(key), _as_text(value)) for key, value in flat(config).items()]
        for first in range(0, len(parameters), 100):  # MLflow takes no more at once
            client.log_batch(self._id, params=parameters[first : first + 100])

    def _continue(self, run: str) -> bool:
        """Whether the server has this run, which then goes on."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        self._id, self._last = run, max((at.step for at in self._client.get_metric_history(run, "loss")), default=-1)
        return True

    def log(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = round(1000 * time.time()), record["step"]
        metrics = [Metric(_name(key), float(value), now, step) for key, value in _numbers(record).items()]
        if step > self._last:
            self._send(partial(self._client.log_batch, self._id, metrics=metrics))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if step > self._last:
            self._send(partial(self._client.log_text, self._id, _text(samples), f"samples/step-{step:06d}.md"))

    def close(self, ok: bool) -> None:
        self._send(partial(self._client.set_terminated, self._id, "FINISHED" if ok else "FAILED"))
        self._send(lambda: None)
        self._thread.shutdown()

    def _send(self, call: Callable[[], object]) -> None:
        self._sent.result()  # the error of the call before, if it failed
        self._sent = self._thread.submit(call)


def _connect(uri: str) -> Any:
    """MLflow's client, which neither waits minutes for a server nor reports to MLflow's makers."""
    settings = {"HTTP_REQUEST_TIMEOUT": "10", "HTTP_REQUEST_MAX_RETRIES": "2", "DISABLE_TELEMETRY": "true"}
    for name, value in settings.items():
        os.environ.setdefault(f"MLFLOW_{name}", value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of every table that it makes
        return mlflow.MlflowClient(uri)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's numbers, without its ``step``."""
    return {key: value for key, value in record.items() if key != "step" and isinstance(value, (int, float))}


def _text(samples: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(f"**{sample['prompt']}**\n\n{sample['answer']}" for sample in samples)


def _name(key: str) -> str:
    """A key with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
