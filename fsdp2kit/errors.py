"""Errors: a user's mistake is one line that says where it is, what is wrong and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_CONVERTERS = ("dcp_to_hf", "hf_to_dcp")


class UserError(Exception):
    """A mistake that the user can fix; the runner prints it as one line and exits with code 2.

    Args:
        where: the file, TOML key or object with the mistake, e.g. ``toml/x.toml: mesh.cp``.
        what: what is wrong there, with the offending value.
        todo: what to do about it.
    """

    def __init__(self, where: str, what: str, todo: str) -> None:
        self.where, self.what, self.todo = where, what, todo
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}; {self.todo}"
        return " ".join(text.split())  # one line, even if a quoted value has several

    def __reduce__(self):
        return (UserError, (self.where, self.what, self.todo))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes; for DCP's `CheckpointException` also the errors of every rank."""
    while error is not None:
        yield error
        if type(error).__name__ == "CheckpointException":  # torch is not imported here
            for failure, _ in getattr(error, "failures", {}).values():
                yield from causes(failure)
        error = error.__cause__ or error.__context__


def tool_command(name: str) -> str:
    """How a message names a tool: ``fsdp2kit plan``, or in a checkout ``python tools/plan.py``.

    A process started as ``fsdp2kit`` says ``fsdp2kit NAME`` even in a checkout. A wheel has no ``tools/`` beside
    the package.
    """
    in_checkout = Path.cwd() == _ROOT and (_ROOT / "tools" / f"{name}.py").is_file()
    if in_checkout and not Path(sys.argv[0]).name.startswith("fsdp2kit"):
        return f"python tools/{name}.py"
    return f"fsdp2kit {'convert' if name in _CONVERTERS else name.replace('_', '-')}"


class RunFailure(RuntimeError):
    """The run itself failed (a non-finite loss, say): the traceback is kept and the exit code is 1."""


class StorageFailure(RunFailure):
    """Writing to the run's storage failed: one line, no traceback, exit code 1.

    Args:
        alone: only this rank knows; the other ranks are in another collective.
    """

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone
