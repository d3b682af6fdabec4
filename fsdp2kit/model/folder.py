"""The safetensors files of a Hugging Face directory, as one set of named tensors, read when they are sliced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fsdp2kit.errors import UserError

INDEX_NAME = "model.safetensors.index.json"


class SafetensorsFolder:
    """All tensors of a directory's safetensors files, open as memory maps, by name.

    Raises:
        UserError: no weights in the directory, a missing, truncated or corrupt file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles: list[Any] = []
        self._owner: dict[str, Any] = {}
        for path in self._files():
            try:
                handle = safe_open(str(path), framework="pt")
                handle.__enter__()
            except FileNotFoundError:
                raise UserError(str(path), "is named in the index but missing", "fetch the model again") from None
            except (SafetensorError, OSError) as error:
                raise UserError(str(path), f"is not a whole safetensors file ({error})", "fetch it again") from None
            self._handles.append(handle)
            self._owner.update(dict.fromkeys(handle.keys(), handle))

    def _files(self) -> list[Path]:
        index = self.directory / INDEX_NAME
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(str(index), f"is not a safetensors index ({error!r})", "fetch it again") from None
            return [self.directory / name for name in names]
        single = self.directory / "model.safetensors"
        if not single.is_file():
            raise UserError(
                "model.path",
                f"{self.directory} has no model.safetensors and no {INDEX_NAME}",
                "convert its weights to safetensors, or set model.weights = 'random'",
            )
        return [single]

    def names(self) -> list[str]:
        """Names of all tensors, in a fixed order."""
        return sorted(self._owner)

    def lazy(self, name: str) -> Any:
        """A safetensors slice object: ``get_shape()``, and indexing reads just that part."""
        return self._owner[name].get_slice(name)

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.__exit__(None, None, None)
