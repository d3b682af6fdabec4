"""The user's mistakes: one line that says where, what, and what to do."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can mend; the runner prints it as one line and exits with code 2.

    Args:
        where: the file, TOML key or object the mistake is in, e.g. ``toml/x.toml: mesh.cp``.
        what: what is wrong there, with the offending value.
        todo: what to do about it.
    """

    def __init__(self, where: str, what: str, todo: str) -> None:
        self.where, self.what, self.todo = where, what, todo
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}; {self.todo}"
        return " ".join(text.split())  # one line, whatever was quoted in it

    def __reduce__(self):
        return (UserError, (self.where, self.what, self.todo))


class RunFailure(RuntimeError):
    """The run itself failed (a non-finite loss, say): the traceback is kept and the exit code is 1."""
