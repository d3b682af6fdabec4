"""The tokenizer's source, its mistakes, and a chat template that travels with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer
from tests.data.helpers import templates
from tests.data.helpers.templates import make_tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> str:
    make_tokenizer(templates.CHATML).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_path_is_the_default_and_tokenizer_comes_first(saved: str, tmp_path: Path) -> None:
    assert build_tokenizer(ModelConfig(path=saved)).chat_template == templates.CHATML
    (tmp_path / "weights").mkdir()
    assert len(build_tokenizer(ModelConfig(path=str(tmp_path / "weights"), tokenizer=saved))) > 256


def test_a_template_file_replaces_the_template_and_is_saved(saved: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(templates.LLAMA3)
    tokenizer = build_tokenizer(ModelConfig(path=saved, chat_template=str(tmp_path / "mine.jinja")))
    tokenizer.save_pretrained(tmp_path / "export")
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == templates.LLAMA3


def test_missing_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer and no model"):
        build_tokenizer(ModelConfig(config={"model_type": "llama"}))
    for missing in (str(tmp_path / "no"), "./no", "a/b/c"):
        with pytest.raises(UserError, match=r"model\.path: .* no such directory"):
            build_tokenizer(ModelConfig(path=missing))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="the directory holds no tokenizer"):
        build_tokenizer(ModelConfig(path=str(tmp_path)))
    with pytest.raises(UserError, match="is a file"):
        build_tokenizer(ModelConfig(tokenizer=str(tmp_path / "config.json")))
    with pytest.raises(UserError, match=r"model\.tokenizer: fsdp2kit/none: the tokenizer cannot be loaded"):
        build_tokenizer(ModelConfig(tokenizer="fsdp2kit/none"), local_files_only=True)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[]", "config.json is no JSON object"),
        ("null", "config.json is no JSON object"),
        ('{"model_type": "llama", "dtype": "float99"}', "not a usable model config: .*float99"),
        ("{", "config.json' is not a valid JSON file"),
    ],
)
def test_a_broken_config_is_not_the_tokenizers_fault(saved: str, text: str, what: str) -> None:
    (Path(saved) / "config.json").write_text(text)
    with pytest.raises(UserError, match=what):
        build_tokenizer(ModelConfig(path=saved))


def test_broken_files(saved: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.chat_template: .*cannot be read"):
        build_tokenizer(ModelConfig(path=saved, chat_template=str(tmp_path / "no.jinja")))
    (tmp_path / "empty.jinja").write_text(" \n")
    with pytest.raises(UserError, match="is empty"):
        build_tokenizer(ModelConfig(path=saved, chat_template=str(tmp_path / "empty.jinja")))
    (Path(saved) / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        build_tokenizer(ModelConfig(path=saved))
