"""A process that calls one reward function: python reward_worker.py FD FUNCTION COLUMNS

FD is a connection's file descriptor, FUNCTION is ``module:name`` or ``path.py:name``, COLUMNS is a list in JSON of the
keywords that it will be called with (empty: not known). Run by its path, so that it imports nothing but what the
function does. The first message says that the function was found and takes these; then each request, a dict of keyword
arguments, is answered. Every message is ``(ok, value)``, and of an error the value is its text.
"""

import ctypes
import importlib
import importlib.util
import inspect
import json
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def load_function(text: str) -> Callable[..., Any]:
    """The function that ``module:name`` or ``path.py:name`` names."""
    where, _, name = text.rpartition(":")
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))  # as python -m has it
        return getattr(importlib.import_module(where), name)
    sys.path.insert(0, str(Path(where).parent))  # its own neighbours, as in a script
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return getattr(module, name)


def check_call(function: Any, columns: Sequence[str]) -> None:
    """Raise a TypeError if the function cannot be called with these keywords."""
    if not callable(function):
        raise TypeError(f"it is of type {type(function).__name__}, no function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return
    try:
        if columns:
            signature.bind(**dict.fromkeys(columns))
    except TypeError as error:
        takes = f"it is called with {', '.join(columns)}; end its arguments with **columns to take all"
        raise TypeError(f"{error}: {takes}") from None


def end_with_parent() -> None:
    """Have the kernel end this process when the trainer ends, even inside a function that never returns."""
    if sys.platform == "linux":  # elsewhere it ends when the function has returned
        set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def describe(error: BaseException) -> str:
    """The error's kind, its first line, and the line of the user's code that it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {reason}{where}" if reason else f"{type(error).__name__}{where}"


def plain(rewards: Any) -> list[float | None]:
    """What a function returned as Python's own numbers: numpy's and torch's arrays become lists."""
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    return [None if value is None else float(value) for value in values]


def main() -> None:
    end_with_parent()
    connection, text, columns = Connection(int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3])
    try:
        function = load_function(text)
        check_call(function, columns)
        connection.send((True, None))
    except BaseException as error:  # a module may call sys.exit
        connection.send((False, describe(error)))
        return
    while True:
        try:
            request = connection.recv()
        except EOFError:  # the trainer has ended
            return
        try:
            connection.send((True, plain(function(**request))))
        except BaseException as error:  # a function may call sys.exit
            connection.send((False, describe(error)))


if __name__ == "__main__":
    main()
