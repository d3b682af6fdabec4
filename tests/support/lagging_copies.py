"""Copies between host and device that end only when the host waits for them, as ``non_blocking`` copies do on CUDA.

The device is imagined, as in `host_syncs`. It is one stream, so its work is done at once and in order; only the host
sees copies late. A copy to the host leaves its target full of ``0xFF`` bytes until the wait, so that reading too early
gives NaN. A copy from the host may read its source as late as the wait: until then the host must not write there. A
copy that goes to the device after one from it needs no wait, because the device orders both.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


class LaggingCopies:
    """The copies under way; `wait` is what ``torch.cuda.current_stream().synchronize()`` is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._to_host: dict[int, tuple[Tensor, Tensor]] = {}
        self._from_host: dict[int, tuple[Tensor, Tensor]] = {}
        self._buffers: set[int] = set()
        self._copy_, self._to = Tensor.copy_, Tensor.to
        self.waits = 0
        monkeypatch.setattr(Tensor, "copy_", self._copying())
        monkeypatch.setattr(Tensor, "to", self._moving())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # asked by builds with CUDA
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=self.wait))

    def wait(self) -> None:
        """Finish all copies."""
        self.waits += 1
        for source, sent in self._from_host.values():
            assert torch.equal(_bytes(source), sent), "the host wrote to a tensor that was still being copied"
        for target, value in self._to_host.values():
            self._copy_(target, value)
        self._to_host.clear()
        self._from_host.clear()

    def _copying(self) -> Callable[..., Tensor]:
        def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not non_blocking:
                return self._copy_(target, source)
            if source.data_ptr() in self._buffers:
                return self._copy_(target, self._sent(source))
            self._buffers.add(target.data_ptr())
            self._from_host.pop(target.data_ptr(), None)  # the device reads it before it writes it
            self._to_host[target.data_ptr()] = target, source.clone()
            _bytes(target).fill_(0xFF)
            return target

        return copy_

    def _moving(self) -> Callable[..., Tensor]:
        def to(source: Tensor, *where: Any, non_blocking: bool = False, **others: Any) -> Tensor:
            return self._sent(source).clone() if non_blocking else self._to(source, *where, **others)

        return to

    def _sent(self, source: Tensor) -> Tensor:
        """What the device receives: what an earlier copy of its own brings there, where one is under way."""
        key = source.data_ptr()
        if key in self._to_host:
            return self._to_host[key][1]
        self._from_host[key] = source, _bytes(source).clone()
        return source


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
