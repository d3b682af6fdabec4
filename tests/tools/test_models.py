"""docs/models.md is what its command finds, and a row says what a run's own check says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from fsdp2kit.rl.engines.transformers_engine import TransformersEngine
from fsdp2kit.torch_compat import SHARDS_INTEGERS
from tests.support.models import full, slow
from tools.models import COLUMNS, EXACT, MARK, main, row_of, table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.full
def test_a_row_says_what_is_exact_and_why_the_rest_is_refused() -> None:
    refused = {} if SHARDS_INTEGERS else {"QLoRA": f"'nf4', but FSDP2 of torch {torch.__version__} shards no integers"}
    assert row_of("llama") == dict.fromkeys(COLUMNS, EXACT) | refused
    row = row_of("mamba")
    assert isinstance(row, dict)
    assert row["one document a row"] == EXACT
    assert "packed documents would see each other" in row["packed"]
    assert "has no attention heads" in row["ring"]
    assert row_of("bart") == "the model is an encoder-decoder model"


@pytest.mark.parametrize(
    ("name", "todo"), [("lama", "did you mean llama?"), ("xyzzy", "`fsdp2kit models --all` shows those it has")]
)
def test_a_type_that_transformers_lacks_is_a_mistake(name: str, todo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama", name]) == 2
    what = f"transformers {transformers.__version__} has no model type of this name"
    assert capsys.readouterr() == ("", f"error: {name}: {what}; {todo}\n")


@pytest.mark.parametrize("model_type", ["llama", slow("bamba"), full("qwen3_next")])
def test_generation_that_takes_padding_for_tokens_is_no_exact_one(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_mask(self: TransformersEngine, *arguments: Any) -> Any:
        generate = self._model.generate
        self._model.generate = lambda ids, **options: generate(
            ids, **options | {"attention_mask": torch.ones_like(options["attention_mask"])}
        )
        return batch(self, *arguments)

    batch = TransformersEngine._generate
    monkeypatch.setattr(TransformersEngine, "_generate", without_mask)
    assert "are not those of each alone" in cast(Any, row_of(model_type))["generation"]


@pytest.mark.slow
def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2] == table()
