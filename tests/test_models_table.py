"""docs/models.md is what its command finds, and a row says what a run's own check says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2kit.models_table import COLUMNS, EXACT, MARK, row_of, table

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


@pytest.mark.full
def test_a_row_says_what_is_exact_and_why_the_rest_is_refused() -> None:
    assert row_of("llama") == dict.fromkeys(COLUMNS, EXACT)
    row = row_of("mamba")
    assert isinstance(row, dict)
    assert row["one document a row"] == EXACT
    assert "packed documents would see each other" in row["packed"]
    assert "has no attention heads" in row["ring"]
    assert row_of("bart") == "the model is an encoder-decoder model"


@pytest.mark.slow
def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2] == table()
