"""Names that torch has moved are taken from where they are."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

import pytest

from fsdp2kit import torch_compat

FOLDER = "torch.distributed.checkpoint"


def test_object_stores_use_the_public_name_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.15, whose private name warns; here it cannot be imported."""
    public = ModuleType(f"{FOLDER}.fsspec_filesystem")
    public.FsspecReader, public.FsspecWriter = type("Reader", (), {}), type("Writer", (), {})  # type: ignore[attr-defined]
    public.__spec__ = importlib.machinery.ModuleSpec(public.__name__, None)
    monkeypatch.setitem(sys.modules, public.__name__, public)
    monkeypatch.setitem(sys.modules, f"{FOLDER}._fsspec_filesystem", None)  # type: ignore[arg-type]
    spec = importlib.util.spec_from_file_location("again", torch_compat.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert (again.FsspecReader, again.FsspecWriter) == (public.FsspecReader, public.FsspecWriter)
