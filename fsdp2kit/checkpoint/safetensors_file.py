"""Writing a safetensors file a tensor at a time.

safetensors' own `save_file` wants all tensors of a file at once and copies their bytes: twice the file in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

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


class SafetensorsWriter:
    """``with SafetensorsWriter(path, forms) as file: file.write(name, tensor)``, once for each name, in any order.

    Args:
        forms: the tensors of the file by name; wider dtypes are placed first, so that each is aligned.
    """

    def __init__(self, path: Path, forms: Mapping[str, TensorForm]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._forms, self._offsets, offset = forms, {}, 0
        for name, form in sorted(forms.items(), key=lambda item: -item[1].dtype.itemsize):
            place = [offset, offset + form.size]
            header[name] = {"dtype": _DTYPES[form.dtype], "shape": list(form.shape), "data_offsets": place}
            self._offsets[name], offset = place[0], place[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._start = self._file.tell()
        self._file.truncate(self._start + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        """Cast a tensor to the form that was announced, and write it."""
        cast = tensor.to(self._forms[name].dtype).contiguous()
        assert tuple(cast.shape) == self._forms[name].shape, name
        self._file.seek(self._start + self._offsets[name])
        self._file.write(cast.reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
