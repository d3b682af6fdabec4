"""What `tools/generate.py` says where there is no model that could answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.reference import tiny_model
from tools import generate

DEMO = Path(__file__).parent.parent / "toml" / "demo"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny model that can chat, if not well."""
    model = tiny_model("smollm2")
    model.resize_token_embeddings(1024, mean_resizing=False)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(DEMO / "tokenizer").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_it_answers(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(model_dir), "Hello?", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("> Hello?\n")


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("", "is not a model directory (no config.json)"),
        ("config.json", "is not a model directory (no config.json)"),
        ("model.safetensors", "cannot be loaded ("),
        ("tokenizer.json", "cannot be loaded ("),
        ("chat_template.jinja", "has no chat template"),
    ],
)
def test_a_bad_path_is_one_line(missing: str, says: str, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if missing:
        (model_dir / missing).unlink()
    else:
        shutil.rmtree(model_dir)
    assert generate.main([str(model_dir), "Hello?"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {model_dir}: {says}")
