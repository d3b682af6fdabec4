"""Runs that are killed with SIGKILL at random moments, taken up again, and compared with one that never was.

Ranks are forked from a server that has imported everything, so that a start costs a fraction of a second. Each rank
notes on a shared board which part of a save it is in; a kill is counted where the board says that it fell.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# Imported by the fork server, for the ranks.
import torch
import torch.distributed as dist

import fsdp2kit.train.loop
from fsdp2kit.checkpoint import run_export
from fsdp2kit.checkpoint.background import BackgroundSave
from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.checkpoint.store import MANIFEST, CheckpointStore
from fsdp2kit.rl.engines.transformers_engine import TransformersEngine
from fsdp2kit.rl.scoring import Scoring
from fsdp2kit.run import load
from tests.support.workers import FORKS

# What is marked while it runs: (phase, where the function is kept, its name).
MARKS: tuple[tuple[str, Any, str], ...] = (
    ("step", fsdp2kit.train.loop, "train_step"),
    ("staging", Checkpoints, "stage"),
    ("staging", BackgroundSave, "collect"),
    ("writing", Checkpoints, "write"),
    ("completing", Checkpoints, "complete"),
    ("rename", CheckpointStore, "publish"),
    ("retention", CheckpointStore, "retain"),
    ("retention", CheckpointStore, "sweep"),
    ("export", run_export, "export_checkpoint"),
    ("generate", TransformersEngine, "generate"),
    ("bucket", TransformersEngine, "load_weights"),
    ("reward", Scoring, "score"),
)
PHASES = tuple(dict.fromkeys(phase for phase, _, _ in MARKS))
SAVING = ("staging", "writing", "completing", "rename", "retention")
_RANK_BYTES = 64


@dataclass(frozen=True)
class Doom:
    """When a rank is killed: `delay` seconds after it enters a phase for the n-th time, or after its start."""

    rank: int
    all_ranks: bool
    phase: str | None
    occurrence: int
    delay: float


@dataclass(frozen=True)
class Kill:
    """A kill that happened, and the innermost phase that the killed rank was in; "between" where in none."""

    phase: str
    all_ranks: bool
    newest: int
    """Step of the newest complete checkpoint that it left; −1 where there was none."""


class Board:
    """Shared memory of the ranks and the harness: for each rank its pid, the step it resumed from, its phases."""

    def __init__(self, path: Path, size: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(_RANK_BYTES * size))
        with path.open("r+b") as stream:
            self._memory = mmap(stream.fileno(), 0)
        self.size = size

    def introduce(self, rank: int) -> None:
        struct.pack_into("qq", self._memory, _RANK_BYTES * rank, os.getpid(), -1)

    def pids(self) -> list[int]:
        return [struct.unpack_from("q", self._memory, _RANK_BYTES * rank)[0] for rank in range(self.size)]

    def note_resume(self, rank: int, step: int) -> None:
        struct.pack_into("q", self._memory, _RANK_BYTES * rank + 8, step)

    def resumed_from(self) -> int:
        return struct.unpack_from("q", self._memory, 8)[0]

    def mark(self, rank: int, phase: str, inside: bool) -> None:
        self._memory[_RANK_BYTES * rank + 16 + PHASES.index(phase)] = inside

    def phase(self, rank: int) -> str:
        """The innermost phase that a rank is in; a background save counts before the step that it runs beside."""
        flags = self._memory[_RANK_BYTES * rank + 16 :][: len(PHASES)]
        inside = [phase for phase, flag in zip(PHASES, flags, strict=True) if flag]
        return inside[-1] if inside else "between"


def serve_rank(rank: int, size: int, folder: Path, toml: str, overrides: Sequence[str], doom: Doom | None) -> None:
    """One rank of one start of a run, in a forked process."""
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    board = Board(folder / "board", size)
    board.introduce(rank)
    if doom and doom.phase is None and doom.rank == rank:
        _kill_later(board, doom)
    for mark in MARKS:
        _watch(mark, rank, board, doom)
    restore = Checkpoints.restore

    def restored(self: Any, *args: Any) -> Any:
        progress = restore(self, *args)
        board.note_resume(rank, progress.step)
        return progress

    Checkpoints.restore = restored
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    recipe, config = load(toml, overrides)
    recipe.main(config)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def _watch(mark: tuple[str, Any, str], rank: int, board: Board, doom: Doom | None) -> None:
    phase, owner, name = mark
    original, entered = getattr(owner, name), [0]

    def watched(*args: Any, **kwargs: Any) -> Any:
        entered[0] += 1
        board.mark(rank, phase, True)
        if doom and (doom.rank, doom.phase, doom.occurrence) == (rank, phase, entered[0]):
            _kill_later(board, doom)
        try:
            return original(*args, **kwargs)
        finally:
            board.mark(rank, phase, False)

    setattr(owner, name, watched)


def _kill_later(board: Board, doom: Doom) -> None:
    def kill() -> None:
        time.sleep(doom.delay)
        for pid in board.pids() if doom.all_ranks else [os.getpid()]:
            if pid not in (0, os.getpid()):
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    if doom.delay == 0:
        kill()
    threading.Thread(target=kill, daemon=True).start()


class Harness:
    """Starts a run on `size` forked ranks, as often as it takes."""

    def __init__(self, folder: Path, *, toml: Path, size: int) -> None:
        self._folder, self._toml, self._size = folder, str(toml), size
        self._starts = 0

    def start(self, overrides: Sequence[str], doom: Doom | None = None) -> Kill | int:
        """One start: the kill that ended it, or the step that it resumed from (−1: none) where it came to its end."""
        self._starts += 1
        folder = self._folder / f"start-{self._starts:04d}"
        folder.mkdir(parents=True)
        board = Board(folder / "board", self._size)
        arguments = [(rank, self._size, folder, self._toml, overrides, doom) for rank in range(self._size)]
        ranks = [FORKS.Process(target=serve_rank, args=one) for one in arguments]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 120
        wait([process.sentinel for process in ranks], timeout=120)  # for the first that ends
        if any(process.exitcode == -signal.SIGKILL for process in ranks):
            # The others are where torchrun finds them: they may still be working, or clearing up after the failure.
            time.sleep(random.Random(self._starts).uniform(0, 0.2))
        else:
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in ranks:
            process.kill()
            process.join()
        codes = [process.exitcode for process in ranks]
        if doom and -signal.SIGKILL in codes:
            return Kill(board.phase(doom.rank), doom.all_ranks, newest=-1)
        logs = "\n".join((folder / f"rank-{rank}.log").read_text()[-3000:] for rank in range(self._size))
        assert codes == [0] * self._size, f"{folder}: exit codes {codes}\n{logs}"
        return board.resumed_from()

    def kill_and_resume(self, run_dir: Path, overrides: Sequence[str], dooms: Sequence[Doom]) -> list[Kill]:
        """Start a run again and again, each time doomed in another way, and at last let it come to its end.

        After every kill, what is complete must be whole; and every start must take up the newest complete checkpoint.
        """
        kills: list[Kill] = []
        newest = -1
        for doom in [*dooms, None]:
            end = self.start([f"run.dir='{run_dir}'", *overrides], doom)
            found = complete_steps(run_dir)
            if isinstance(end, int):
                assert end == newest, f"{run_dir}: resumed from {end}, and {newest} was the newest complete one"
                return kills
            assert max(found, default=-1) >= newest, f"{run_dir}: {newest} was complete, and now there is {found}"
            newest = max(found, default=-1)
            kills.append(Kill(end.phase, end.all_ranks, newest))
        raise AssertionError("the last start has no doom, so it came to its end")


def complete_steps(run_dir: Path) -> list[int]:
    """Steps of all checkpoints with a manifest, each of which must be whole."""
    steps = []
    for path in (run_dir / "checkpoints").glob("*step-*"):
        if (path / MANIFEST).is_file() and not path.name.startswith((".tmp-", ".trash-")):
            verify(path)
            steps.append(int(path.name.rpartition("-")[2]))
    return steps


def draw(generator: random.Random, *, size: int, saves: int) -> Doom:
    """A third of the kills at any moment of the run, the others in and around a phase of one of its saves."""
    rank, all_ranks = generator.randrange(size), generator.random() < 0.5
    if generator.random() < 1 / 3:
        return Doom(rank, all_ranks, None, 0, delay=generator.uniform(0, 2.0))
    phase = generator.choice(SAVING)
    if phase in ("rename", "retention"):
        rank = 0  # only rank 0 is ever there
    occurrence = generator.randint(1, saves)
    return Doom(rank, all_ranks, phase, occurrence, delay=generator.choice((0.0, generator.uniform(0, 0.03))))


def tally(kills: Sequence[Kill]) -> str:
    """How many kills fell into which phase, in one line."""
    counts = Counter(kill.phase for kill in kills)
    saving = sum(counts[phase] for phase in SAVING)
    parts = ", ".join(f"{phase} {counts[phase]}" for phase in (*PHASES, "between") if counts[phase])
    return f"{len(kills)} kills, {saving} inside a save: {parts}"
