"""Errors: a user's mistake is one line that says where it is, what is wrong and what to do."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
from collections.abc import Iterable, Iterator

_MLFLOW = ("mlflow-skinny>=3.17", "sqlalchemy>=2", "alembic")
REQUIREMENTS = {
    "peft": ("peft>=0.20",),
    "torchao": ("torchao>=0.18",),
    "liger_kernel": ("liger-kernel",),
    "matplotlib": ("matplotlib>=3.9",),
    "griffe": ("griffe>=2",),
    "tensorboard": ("tensorboard>=2.20",),
    "mlflow": _MLFLOW,
    "sqlalchemy": _MLFLOW,
    "alembic": _MLFLOW,
}
"""What pip installs for each module of our extras, as pyproject.toml has it: ``fsdp2kit[extra]`` would need fsdp2kit
itself on a package index."""


class UserError(Exception):
    """A mistake that the user can fix; the runner prints it as one line and exits with code 2.

    Args:
        where: the file, TOML key or object with the mistake, e.g. ``toml/x.toml: mesh.cp``.
        what: what is wrong there, with the value.
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


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The one of ``known`` that ``name`` is probably meant to be; None if there is none.

    Args:
        cutoff: least similarity, from 0 to 1, as difflib computes it.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """What to do about an unknown name: the question after the `nearest` one, or ``otherwise`` if there is none."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else otherwise


def check_installed(package: str, *, where: str) -> None:
    """Refuse what needs a package of one of our extras, where that is not installed. Nothing is imported."""
    if importlib.util.find_spec(package) is None:
        raise _missing(package, where, "is not installed")


@contextlib.contextmanager
def importing(package: str, *, where: str) -> Iterator[None]:
    """Imports of a package of one of our extras; one that fails is a `UserError` at ``where``."""
    try:
        yield
    except ImportError as error:
        raise _missing(package, where, f"cannot be imported ({error})") from None


def _missing(package: str, where: str, what: str) -> UserError:
    return UserError(where, f"needs {package}, which {what}", f"install it: {pip_install(package)}")


def pip_install(module: str) -> str:
    """The command that installs a module of our extras, quoted for a shell."""
    return " ".join(["pip install", *(f"'{one}'" if ">" in one else one for one in REQUIREMENTS[module])])


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes; for DCP's `CheckpointException` also the errors of every rank."""
    while error is not None:
        yield error
        if type(error).__name__ == "CheckpointException":  # torch is not imported here
            for failure, _ in getattr(error, "failures", {}).values():
                yield from causes(failure)
        error = error.__cause__ or error.__context__


class RunFailure(RuntimeError):
    """The run itself failed: the traceback is kept and the exit code is 1."""


class KnownFailure(RunFailure):
    """A failure whose cause its line says: no traceback on the console, exit code 1.

    Args:
        alone: only this rank knows; the other ranks are in another collective.
    """

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone


class StorageFailure(KnownFailure):
    """Writing to the run's storage failed."""


class NonFiniteFailure(KnownFailure):
    """Loss or gradients are not finite. Every rank raises it."""
