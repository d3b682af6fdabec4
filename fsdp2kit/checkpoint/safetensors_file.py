"""Writing a safetensors file from its first byte to its last, a block at a time, to a disk or an object store.

safetensors' own `save_file` wants all tensors of a file at once and copies their bytes: twice the file in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from fsdp2kit.checkpoint.store import is_remote

LET_GO_BYTES = 1 << 26
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorForm:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def file_size(forms: Mapping[str, TensorForm]) -> int:
    """Bytes of a file with these tensors, in this order."""
    return len(_header(forms)) + sum(form.size for form in forms.values())


class SafetensorsWriter:
    """``with SafetensorsWriter(path, forms) as file: file.write(name, blocks)``, for each name in order; then synced.

    Args:
        forms: the tensors of the file by name, in the order of their bytes. Wider dtypes first keeps each aligned.
    """

    def __init__(self, path: Path, forms: Mapping[str, TensorForm]) -> None:
        self._is_remote = is_remote(path)
        self._left = list(forms.items())[::-1]
        self._written = 0
        self._file = path.open("wb")
        self._file.write(_header(forms))

    def write(self, name: str, blocks: Iterable[Tensor]) -> None:
        """Write the next tensor; its elements come in order, in flat blocks, and are cast to the announced dtype."""
        expected, form = self._left.pop()
        written = 0
        for block in blocks:
            written += self._file.write(block.to(form.dtype).contiguous().view(torch.uint8).numpy().data)
        assert (name, written) == (expected, form.size), f"{name}: {written} bytes for {expected}, {form}"
        self._written += written
        if self._written >= LET_GO_BYTES:
            self._let_go()

    def _let_go(self) -> None:
        """Have the system write what there is to the disk now, and keep its cache for what is being read."""
        self._written = 0
        if not self._is_remote and hasattr(os, "posix_fadvise"):  # not on macOS
            self._file.flush()
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if not self._is_remote and kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def _header(forms: Mapping[str, TensorForm]) -> bytes:
    """The length of the header in 8 bytes, and the header, padded so that the tensors begin at a multiple of 8."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, form in forms.items():
        offsets = [start, start + form.size]
        header[name] = {"dtype": _DTYPES[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
        start += form.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
