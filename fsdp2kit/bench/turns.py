"""A training loop that only knows how to run to its end, run one step at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Turns:
    """Runs ``work`` in a thread of its own, which stands still wherever it calls `wait`.

    One of the two threads runs at any time: the caller's outside `advance`, the other's inside it.

    Args:
        work: runs to its end; it calls `wait` on this object when a step is over, and comes to its end soon after
            `wait` has returned False.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._stopping = self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def advance(self) -> None:
        """Let it run to its next `wait`.

        Raises:
            RuntimeError: it came to its end instead.
            BaseException: what ``work`` raised.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        if self._over and not self._stopping:
            raise RuntimeError("the loop came to its end")

    def wait(self) -> bool:
        """Called by ``work`` between two steps; returns whether it should go on."""
        self._done.release()
        self._go.acquire()
        return not self._stopping

    def stop(self) -> None:
        """Let it come to its end."""
        self._stopping = True
        if self._thread.ident is not None and not self._over:
            self.advance()
            self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # handed to the thread that waits for this one
            self._error = error
        self._over = True
        self._done.release()
