"""The user's environments (docs/environments.md), in a process of their own, which can be killed if one hangs."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from fsdp2kit.config.rl_schema import RolloutConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job import stop
from fsdp2kit.rl.reward_worker import shortened
from fsdp2kit.rl.user_process import IMPORT_SECONDS, UserProcess

_LOOK_SECONDS = 0.25


class Environments:
    """The environments of this rank's conversations, by a number for each; a context manager, which ends the process.

    `reset` and `step` wait for the user's code, and raise `Stopped` if the run is asked to stop meanwhile. They may be
    called from several threads, and then run at once.

    Raises:
        UserError: the class cannot be imported, or lacks a method.
    """

    def __init__(self, section: RolloutConfig) -> None:
        assert section.environment is not None, "asked for by rollout.environment"
        self._seconds, self._where = section.environment_seconds, f"rollout.environment: {section.environment}"
        self._numbers, self._calls = itertools.count(), itertools.count()
        self._waiting: dict[int, Future[tuple[bool, Any]]] = {}
        self._lock, self._cause, self._is_late = threading.Lock(), "", False
        self._process = UserProcess(["-m", "fsdp2kit.rl.environment_worker"], section.environment)
        self._connection = self._process.connection
        try:
            is_good, text = self._connection.recv() if self._process.has_answer(IMPORT_SECONDS) else (False, "hangs")
        except (EOFError, OSError):
            is_good, text = False, f"its process ended with exit code {self._process.exit_code()}"
        if not is_good:
            self._process.kill()
            raise UserError(self._where, text, "mend the class, or its name")
        # Sent by a thread of its own: where the pipe is full, those who ask still notice that their time is over.
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def open(self) -> int:
        """A number for a new environment."""
        return next(self._numbers)

    def reset(self, number: int, row: Any) -> tuple[list[Any], list[Any] | None]:
        """Begin a conversation; its first messages, and its tools."""
        messages, tools = self._ask("reset", number, row, given=f"the row {json.dumps(row, default=str):.200}")
        return messages, tools

    def step(self, number: int, messages: list[dict[str, Any]]) -> list[Any] | float:
        """Go on after the model's turn, the last message; the next messages, or the conversation's reward."""
        return self._ask("step", number, messages, given=f"the model's {shortened(messages[-1]['content'])}")

    def close(self, number: int) -> None:
        """Drop an environment."""
        self._ask("close", number, None, given="nothing")

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._requests.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
        self._connection.close()

    def _ask(self, kind: str, number: int, argument: Any, *, given: str) -> Any:
        answer: Future[tuple[bool, Any]] = Future()
        call = next(self._calls)
        request = pickle.dumps((call, kind, number, argument))
        with self._lock:
            if self._cause:
                answer.set_result((False, self._cause))
            else:
                self._waiting[call] = answer
                self._requests.put(request)
        deadline = time.monotonic() + self._seconds
        while not wait([answer], timeout=min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))).done:
            stop.check()
            if time.monotonic() >= deadline:
                break
        if answer.done():
            is_good, value = answer.result()
        else:
            is_good, value = False, f"did not answer within {self._seconds:g} s"
            with self._lock:
                self._cause = self._cause or f"its process was ended, because {kind} {value}"
                self._is_late = True
            self._process.kill()
        if not is_good:
            more = ", or give it more time: rollout.environment_seconds"
            todo = "mend the environment" + more * self._is_late
            raise UserError(self._where, f"{kind}: {value}; it was given {given}", todo)
        return value

    def _send(self) -> None:
        """Send requests, until the process ends."""
        with suppress(OSError):  # it has ended: `_receive` says so
            while (request := self._requests.get()) is not None:
                self._connection.send_bytes(request)

    def _receive(self) -> None:
        """Hand answers to those who wait, until the process ends."""
        try:
            while True:
                call, is_good, value = self._connection.recv()
                with self._lock:
                    self._waiting.pop(call).set_result((is_good, value))
        except (EOFError, OSError):
            with self._lock:
                self._cause = self._cause or f"its process ended with exit code {self._process.exit_code()}"
                for answer in self._waiting.values():
                    answer.set_result((False, self._cause))
                self._waiting.clear()
