"""Global batches made in the background, ahead of the step that wants them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from fsdp2kit.data.batch import Batch
from fsdp2kit.data.streamloader import State, StreamLoader


class AnyLoader(Protocol):
    """What `Prefetch` needs of a loader."""

    @property
    def source_names(self) -> tuple[str, ...]: ...

    @property
    def steps_per_epoch(self) -> int: ...

    def batch(self, index: int, /) -> list[Batch]: ...


class Prefetch:
    """A loader whose next batches are made by one thread while the current one is trained on.

    Tokenisers, file reads and numpy leave the interpreter free most of the time, so the step hardly notices.
    """

    def __init__(self, loader: AnyLoader, *, ahead: int, stop: int) -> None:
        """
        Args:
            ahead: batches made beyond the one that was asked for; 0 makes each when it is asked for.
            stop: index of the first batch that nobody will ask for.
        """
        self._loader, self._ahead, self._stop = loader, ahead, stop
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._made: dict[int, Future[tuple[list[Batch], State | None]]] = {}
        self._states: dict[int, State | None] = {}

    @property
    def steps_per_epoch(self) -> int:
        return self._loader.steps_per_epoch

    @property
    def source_names(self) -> tuple[str, ...]:
        return self._loader.source_names

    def batch(self, index: int) -> Sequence[Any]:
        """The loader's batch ``index``; asks for the ones after it.

        Raises:
            Exception: what making that batch raised, when that batch is asked for.
        """
        for at in range(index, max(index, min(index + self._ahead, self._stop - 1)) + 1):
            if at not in self._made:
                self._made[at] = self._thread.submit(self._make, at)
        batches, self._states[index + 1] = self._made.pop(index).result()
        self._states.pop(index - 1, None)
        return batches

    def state(self, index: int) -> State | None:
        """What a stream needs to make batch ``index``, just asked for or next, again; None for data read whole."""
        return self._states.get(index)

    def close(self) -> None:
        """Forget what was made ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _make(self, index: int) -> tuple[list[Batch], State | None]:
        batches = self._loader.batch(index)
        # Taken here, by the only thread that moves the stream.
        return batches, self._loader.state(index + 1) if isinstance(self._loader, StreamLoader) else None
