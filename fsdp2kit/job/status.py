"""What this rank is doing: its step and phase, its place in the code, and how much of its time it waits.

A change of phase is one assignment. A thread looks at the main thread's stack fifty times a second, to tell work from
waiting in a collective. `lost_ranks` reports all of it to the other ranks.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_LOOK_SECONDS = 0.02
_DEVICE = "waiting for the device"
# Folders of code that a user did not write. fsdp2kit itself may be installed in the second.
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))
_PACKAGE = str(Path(__file__).parents[1])
# Tensor dispatch and FSDP's hooks compute; they wait in functions of the other files of torch.distributed.
_COLLECTIVES = "/torch/distributed/"
_COMPUTES = ("/torch/distributed/tensor/", "/torch/distributed/fsdp/")
_CALLS_OPERATORS = "/torch/_ops.py"


@dataclass(frozen=True)
class Position:
    """Where a rank is in its run. All ranks pass through the same positions."""

    number: int = 0
    """How many positions it has passed."""
    step: int = 0
    """The step that is being made, from 1; 0 before the first."""
    activity: str = "starting"
    """What it does besides training; empty in a step."""
    phase: str = ""

    def __str__(self) -> str:
        """``step 12, backward``, ``step 12, evaluating, forward`` or ``starting, reading the data``."""
        return ", ".join(part for part in (f"step {self.step}" * bool(self.step), self.activity, self.phase) if part)


_now = Position()
_looks = _waits = 0
_looker: threading.Thread | None = None
_over = threading.Event()


def begin(activity: str, *, step: int | None = None) -> None:
    """Say that this rank begins an activity; "" is a step of training. Every rank calls it.

    Args:
        step: the step that it belongs to; None: the same as before.
    """
    global _now
    _now = Position(_now.number + 1, _now.step if step is None else step, activity)


def begin_run() -> None:
    """Another run begins in this process."""
    global _now
    _now = Position(_now.number + 1)


def enter(phase: str) -> None:
    """Say that this rank enters a phase of its activity. Every rank calls it."""
    global _now
    _now = Position(_now.number + 1, _now.step, _now.activity, phase)


def enter_device_wait() -> None:
    """Say that this rank waits for its device until it enters another phase."""
    enter(_DEVICE)


def position() -> Position:
    """Where this rank is now."""
    return _now


def watch_waiting() -> None:
    """Start the thread that counts how often the main thread waits, until `stop`; a second call does nothing."""
    global _looker
    if _looker is None or not _looker.is_alive():  # a fork has no threads
        _over.clear()
        _looker = threading.Thread(target=_look_on, daemon=True, name="fsdp2kit-waiting")
        _looker.start()


def stop() -> None:
    """End the thread of `watch_waiting`."""
    global _looker
    _over.set()
    if _looker is not None:
        _looker.join()
        _looker = None


def take_looks() -> tuple[int, int]:
    """How often the thread has looked since the last call, and how often the main thread was waiting."""
    global _looks, _waits
    taken = (_looks, _waits)
    _looks = 0
    _waits = 0
    return taken


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread with this innermost frame waits in a collective, or this rank waits for its device.

    It reads the callers' frames only where the innermost one calls an operator, which may be a collective: the thread
    of `watch_waiting` reads them while the main thread runs, and torch.compile swaps the frames of what it compiles.
    """
    is_in_operator = frame is not None and frame.f_code.co_filename.endswith(_CALLS_OPERATORS)
    files = [one.f_code.co_filename for one in _outwards(frame, most=3 if is_in_operator else 1)]
    waits = any(_COLLECTIVES in file and not any(part in file for part in _COMPUTES) for file in files)
    return waits or _now.phase == _DEVICE


def is_failing() -> bool:
    """Whether the main thread handles an exception: in ``except``, ``finally`` or ``__exit__``."""
    found = sys._current_exceptions().get(threading.main_thread().ident or 0)
    return found not in (None, (None, None, None))  # of Python 3.12 and later, and of earlier ones


def place_of_work() -> str:
    """`place_of` the main thread; empty while it waits. No frame is kept: it would keep the local tensors."""
    frame = main_frame()
    return "" if is_waiting(frame) else place_of(frame)


def place_of(frame: FrameType | None) -> str:
    """``recipes/own.py:33 in slow``: the innermost line that is not a library's, or else the innermost one."""
    frames = _outwards(frame)
    own = [one for one in frames if _is_own(one.f_code.co_filename)]
    for found in (own or frames)[:1]:
        path = Path(found.f_code.co_filename)
        return f"{path.parent.name}/{path.name}:{found.f_lineno} in {found.f_code.co_name}"
    return ""


def _look_on() -> None:
    global _looks, _waits
    while not _over.wait(_LOOK_SECONDS):
        _waits += is_waiting(main_frame())
        _looks += 1


def _outwards(frame: FrameType | None, *, most: int = 100) -> list[FrameType]:
    """A frame and those that called it."""
    found: list[FrameType] = []
    while frame is not None and len(found) < most:
        found.append(frame)
        frame = frame.f_back
    return found


def _is_own(file: str) -> bool:
    return file.startswith(_PACKAGE) or (not file.startswith((*_LIBRARIES, "<")) and "site-packages" not in file)
