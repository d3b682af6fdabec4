"""A job: its process group, mesh, locked run directory, and a record of what was run.

with start_job(config) as job:
    ...
    job.open_run_dir(dtypes=plan.ledger)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp2kit.config import TrainingConfig, dump_toml
from fsdp2kit.config.checks import check_config
from fsdp2kit.console import heard_by, say
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.redaction import without_secrets
from fsdp2kit.job import distributed, process, status, stop, tracebacks
from fsdp2kit.job.distributed import World, agreement
from fsdp2kit.job.environment import describe_environment
from fsdp2kit.job.events import Events, changes
from fsdp2kit.job.hosts import check_hosts
from fsdp2kit.job.layout import Layout
from fsdp2kit.job.mesh import Mesh, build_mesh
from fsdp2kit.job.run_directory import RecordBefore, begin_start, flat_config, lock_run_dir, write_record
from fsdp2kit.job.stop import Stopped


@dataclass(frozen=True)
class Job:
    """This process's part in a job; see `start_job`."""

    config: TrainingConfig
    world: World
    mesh: Mesh
    environment: dict[str, Any]
    """Versions, devices, mesh, git commit and, from `open_run_dir` on, the dtype ledger: ``environment.json``."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Closed when the job ends, in reverse order."""
    events: Events = field(default_factory=Events)
    """``events.jsonl``, on the main rank from `open_run_dir` on."""

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def is_main(self) -> bool:
        return self.world.is_main

    def open_run_dir(self, *, dtypes: Any = None) -> None:
        """Create and lock the run directory, and write ``config.toml`` and ``environment.json``. Collective.

        Call it after everything that may refuse the run, so that a refused start leaves no files.

        Args:
            dtypes: the plan's dtype ledger, a dataclass.

        Raises:
            UserError: another process has the run directory, or it cannot be written to.
        """
        self.environment["dtype_ledger"] = asdict(dtypes) if dtypes is not None else None
        with agreement():
            if self.is_main:
                self._record_start()
        tracebacks.keep_in(self.run_dir / "errors", nccl=self.world.device.type == "cuda")

    def _record_start(self) -> None:
        """Lock the run directory and write this start's record. A start that is refused later takes it back."""
        self.closing.enter_context(lock_run_dir(self.run_dir))
        start = begin_start(self.run_dir)
        self.environment["start"] = start
        before = RecordBefore(self.run_dir)

        def put_back_if_refused(_kind: Any, error: BaseException | None, _traceback: Any) -> None:
            if _is_refusal(error):
                before.put_back(start=start)

        self.closing.push(put_back_if_refused)
        text = dump_toml(self.config)
        write_record(self.run_dir, config_text=text, environment=self.environment)
        self.events.open_in(self.run_dir, start=start)
        told = {name: self.environment.get(name) for name in ("world_size", "hosts", "mesh", "command")}
        changed = changes(before.config, flat_config(without_secrets(text))) if before.config else {}
        self.events.record("start", **told, changed=changed)


@contextlib.contextmanager
def start_job(config: TrainingConfig) -> Iterator[Job]:
    """Start the process group and build the mesh: ``with start_job(config) as job``. Collective.

    The job has ``mesh``, ``world``, ``run_dir``, and ``open_run_dir(dtypes=plan.ledger)``, which creates and locks the
    run directory. The process group stays up afterwards; `fsdp2kit.run`, or another caller, ends it.

    Raises:
        UserError: the config does not fit the world it runs in, or its hosts differ (`check_hosts`).
    """
    world = distributed.start(timeout_minutes=config.run.timeout_minutes, deterministic=config.run.deterministic)
    process.begin_job()
    tracebacks.keep_nowhere()
    status.begin_run()
    with agreement():  # a login, or an optional package, may be on one machine alone
        sizes = check_config(config, world_size=world.size, local_world_size=world.ranks_per_node)
    check_hosts(config, world)
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    layout = Layout(sizes, config.fsdp, world.hosts)
    say(*layout.draw())
    environment = describe_environment(world_size=world.size, mesh=asdict(sizes))
    events = Events(is_kept=world.is_main, clean=without_secrets)
    job = Job(config, world, mesh, {**environment, "hosts": layout.ranks()}, events=events)
    with job.closing, _recording(events):
        yield job


@contextlib.contextmanager
def _recording(events: Events) -> Iterator[None]:
    """Record the block's warnings, and the error that ends it."""

    def end_stopped() -> None:
        request = stop.current()
        events.record("stop", reason=request.reason if request else None)
        events.record("end", outcome="stopped")

    try:
        with heard_by(events.hear), stop.last_word(end_stopped):
            yield
    except Stopped:
        end_stopped()
        raise
    except (Exception, KeyboardInterrupt) as error:
        text = str(error)
        if not isinstance(error, (UserError, RunFailure)):
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
        kind = "refusal" if _is_refusal(error) else "failure"
        lost = {"lost": True} if distributed.is_lost_rank(error) else {}
        events.record(kind, text=text.partition("\n")[0], **lost)
        raise
    else:
        if "end" not in events.recorded:  # a recipe with a loop of its own
            events.record("end", outcome="done")
    finally:
        events.close()


def _is_refusal(error: BaseException | None) -> bool:
    """Whether an error refuses a start: it is the user's, and no step was begun."""
    return isinstance(error, UserError) and not status.position().step
