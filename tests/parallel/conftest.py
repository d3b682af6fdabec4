"""The tiny models that the tests of this folder train."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from transformers.models.llama import modeling_llama

from tests.support.models import ADAPTERS, TINY, tiny_model_dir, write_adapter

ADAPTED = ("llama3", "smollm2", "qwen3", "qwen3_moe")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every tiny model, and all adapters of some (``ADAPTED``)."""
    folder = tmp_path_factory.mktemp("models")
    for kind in TINY:
        tiny_model_dir(kind, folder)
    for kind, name in itertools.product(ADAPTED, ADAPTERS):
        write_adapter(folder, kind, name)
    return folder


@pytest.fixture
def biased_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's attention gets a bias that no config names, as a new architecture's might have."""
    original = modeling_llama.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        return original(module, query, key + 0.3 * key.flip(-1), value, attention_mask, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
