"""A process that holds conversations' environments: python -m fsdp2kit.rl.environments.environment_worker FD CLASS

FD is a connection's file descriptor, CLASS is ``module:name`` or ``path.py:name``. The first message, ``(ok, text)``,
says whether the class was imported. Then each request ``(call, kind, number, argument)`` gets an answer
``(call, ok, value)``, in any order: "reset" makes an environment of that number and resets it with a row, "step" gives
it the messages so far, "close" drops it. Coroutines run in one event loop, other methods in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from fsdp2kit.rl.rewards.reward_worker import describe, end_with_parent, load_function

_THREADS = 256  # of methods that wait for something; a rank asks for `rollout.batch_size` at once


class EnvironmentHost:
    """The environments of one rank's conversations.

    Args:
        make: the user's class.
    """

    def __init__(self, make: Callable[[], Any], connection: Connection) -> None:
        self._make = make
        self._connection = connection
        self._environments: dict[int, Any] = {}
        self._threads = ThreadPoolExecutor(_THREADS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer requests until the trainer has ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def receive() -> None:
            try:
                request = self._connection.recv()
            except (EOFError, OSError):
                loop.remove_reader(self._connection.fileno())
                ended.set()
                return
            task = loop.create_task(self._answer(*request))
            self._tasks.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self._tasks.discard)

        loop.add_reader(self._connection.fileno(), receive)
        await ended.wait()

    async def _answer(self, call: int, kind: str, number: int, argument: Any) -> None:
        try:
            value = await getattr(self, f"_{kind}")(number, argument)
            answer = (call, True, value)
        except BaseException as error:  # the user's code may call sys.exit
            answer = (call, False, describe(error))
        self._connection.send(answer)

    async def _reset(self, number: int, row: Any) -> tuple[Any, Any]:
        environment = self._environments[number] = await self._run(self._make)
        found = await self._run(environment.reset, row)
        messages, tools = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(messages, list) or not isinstance(tools, (list, type(None))):
            shape = "messages, or messages and tools: lists of dicts"
            raise TypeError(f"reset returns {shape}, and returned {found!r:.200}")
        return _as_json(messages, "reset"), _as_json(tools, "reset")

    async def _step(self, number: int, messages: Any) -> Any:
        found = await self._run(self._environments[number].step, messages)
        if isinstance(found, list) and found:
            return _as_json(found, "step")
        reward = None if isinstance(found, (str, list)) else _as_number(found)
        if reward is None or not math.isfinite(reward):
            shape = "a list of the next messages, or the reward: a finite number"
            raise TypeError(f"step returns {shape}, and returned {found!r:.200}")
        return reward

    async def _close(self, number: int, _: None) -> None:
        close = getattr(self._environments.pop(number, None), "close", None)
        if close is not None:
            await self._run(close)

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        # A plain method may hand on a coroutine: a decorator's, or an object's with ``async def __call__``.
        return await found if inspect.isawaitable(found) else found


def _as_json(value: Any, method: str) -> Any:
    """The value as a checkpoint keeps it, with lists for tuples and texts for other keys."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{method} returned what JSON cannot hold ({error})") from None


def _as_number(value: Any) -> float | None:
    """The value as Python's number, numpy's and torch's too; None if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def check_class(made: Any) -> None:
    """Raise a TypeError if this cannot be an environment's class."""
    if not callable(made):
        raise TypeError(f"it is of type {type(made).__name__}, no class")
    if missing := [name for name in ("reset", "step") if not callable(getattr(made, name, None))]:
        raise TypeError(f"it has no method {' and no method '.join(missing)}")


def main() -> None:
    end_with_parent()
    connection = Connection(int(sys.argv[1]))
    text = sys.argv[2]
    try:
        made = load_function(text)
        check_class(made)
        connection.send((True, ""))
    except BaseException as error:  # a module may call sys.exit
        connection.send((False, describe(error)))
        return
    asyncio.run(EnvironmentHost(made, connection).serve())


if __name__ == "__main__":
    main()
