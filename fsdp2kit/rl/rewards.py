"""The user's reward functions (docs/grpo.md). Each has its own process, which can be killed if it hangs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fsdp2kit.config.rl_schema import RewardConfig
from fsdp2kit.data.contents import Content
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import agreement, gather_objects
from fsdp2kit.rl.reward_code import code_digests, content_of_code, option_digests
from fsdp2kit.rl.reward_worker import excerpt
from fsdp2kit.rl.user_process import IMPORT_SECONDS, UserProcess

_WORKER = Path(__file__).with_name("reward_worker.py")


class Rewards(ExitStack):
    """The functions of ``[[reward]]``; a context manager, which ends their processes."""

    def __init__(self, sections: Sequence[RewardConfig], *, columns: Collection[str] = ()) -> None:
        """Start this rank's processes. Collective.

        Args:
            columns: what the functions will be called with, by keyword; empty: not known.

        Raises:
            UserError: a function cannot be imported, or not be called with ``columns`` and its options; two have the
                same name.
        """
        super().__init__()
        self.names = [section.label for section in sections]
        """What the metrics call each function."""
        self.weights = np.array([section.weight for section in sections])
        """Each function's weight in the sum, float64."""
        self.contents: dict[str, Content] = {}
        """Each function's source and options, by its name in messages."""
        self._columns, self._workers = columns, list[_Worker]()
        with agreement(), ExitStack() as started:
            if twice := next((name for name in self.names if self.names.count(name) > 1), None):
                raise UserError("reward", f"two are named {twice!r}", "give each a name of its own")
            for number, section in enumerate(sections):
                self._workers.append(_Worker(number, section, columns))
                started.callback(self._workers[-1].end)
            for worker in self._workers:
                worker.receive(IMPORT_SECONDS)
            code = [{**code_digests(one.function), **option_digests(one.options)} for one in sections]
            self.push(started.pop_all())
        code = gather_objects(code)[0]  # rank 0's: another rank may have read a file that changed meanwhile
        for name, section, files in zip(self.names, sections, code, strict=True):
            content = content_of_code(section.function, files, otherwise="another function")
            self.contents[f"reward.{name}"] = content

    def __call__(self, arguments: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Each response's reward by each function, float64 ``[responses, functions]``. All functions run at once.

        Args:
            arguments: by keyword, a list with one item for each response.
        """
        count = len(arguments["completions"])
        if not count:
            return np.zeros((0, len(self.names)))
        # A column that none of these rows has is still a keyword: a function may ask for it by name.
        absent = {name: [None] * count for name in self._columns if name not in arguments}
        for worker in self._workers:
            worker.send({**arguments, **absent})
        found = np.zeros((count, len(self._workers)))
        for number, worker in enumerate(self._workers):
            found[:, number] = worker.rewards(arguments)
        return found


class _Worker:
    """The process of one function."""

    def __init__(self, number: int, section: RewardConfig, columns: Collection[str]) -> None:
        self._section, self._number = section, number
        self._process = UserProcess([str(_WORKER)], section.function)
        self._connection = self._process.connection
        self.send((list(columns), section.options))

    def send(self, request: Any) -> None:
        with self._lost_is_an_error():
            self._connection.send(request)

    def receive(self, seconds: float) -> Any:
        """The next message; a UserError if it is an error, or if none comes in time. `Stopped` as of `has_answer`."""
        with self._lost_is_an_error():
            if not self._process.has_answer(seconds):
                self.end()
                todo = "mend it, or give it more time: reward.timeout_seconds"
                raise self._fault(f"did not answer within {seconds:g} s", todo)
            is_good, value = self._connection.recv()
        if not is_good:
            key, what, todo = value
            raise self._fault(what, todo, key=key)
        return value

    def rewards(self, arguments: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """The answer to a request with these arguments."""
        count = len(arguments["completions"])
        values = self.receive(self._section.timeout_seconds)
        if len(values) != count:
            what = f"returned {len(values)} rewards for {count} responses"
            raise self._fault(what, "return one for each completion")
        for number, value in enumerate(values, start=1):
            if value is not None and not math.isfinite(value):
                what = f"returned {value} for response {number} of {count}: {excerpt(arguments, number - 1)}"
                raise self._fault(what, "return finite numbers, or None where it does not apply")
        return np.array([value or 0.0 for value in values])

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self._connection.close()
        self._process.kill()

    @contextmanager
    def _lost_is_an_error(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            code = self._process.exit_code()
            self.end()
            what = f"its process ended with exit code {code}"
            raise self._fault(what, "the function must return; see what it printed above") from None

    def _fault(self, what: str, todo: str, *, key: str = "function") -> UserError:
        return UserError(f"reward.{self._number}.{key}: {self._section.function}", what, todo)
