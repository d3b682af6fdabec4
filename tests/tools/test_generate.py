"""What `tools/generate.py` answers, and what it says where there is no model that could."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from tests.support.models import demo_model_dir
from tools import generate

DEMO = Path(__file__).parents[2] / "toml" / "demo"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny model that can chat, if not well."""
    return demo_model_dir(tmp_path / "model")


def test_it_answers(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(model_dir), "Hello?", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("> Hello?\n")


def test_without_a_chat_template_it_continues_a_text(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model_dir / "chat_template.jinja").unlink()
    tokenizer, model = generate.load(model_dir)
    inputs = tokenizer("Once upon a", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert generate.main([str(model_dir), "Once upon a", "--max-new-tokens", "4"]) == 0
    answer = tokenizer.decode(output, skip_special_tokens=True).strip()
    assert capsys.readouterr().out == f"> Once upon a\n{answer}\n"


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("", "is not a model directory (no config.json)"),
        ("config.json", "is not a model directory (no config.json)"),
        ("model.safetensors", "cannot be loaded ("),
        ("tokenizer.json", "cannot be loaded ("),
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


@pytest.mark.parametrize("count", ["0", "-1"])
def test_no_tokens_to_generate(count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.main([str(tmp_path), "Hello?", "--max-new-tokens", count])
    assert caught.value.code == 2
    assert f"--max-new-tokens: {count} is not positive" in capsys.readouterr().err


def test_a_text_is_continued_where_the_tokenizer_ends_texts(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an EOS behind the prompt the model would continue after the end of the text."""
    (model_dir / "chat_template.jinja").unlink()
    tokenizer, model = generate.load(model_dir)
    ids = tokenizer("Once upon a", add_special_tokens=False, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] :]
    special = [(str(tokenizer.eos_token), tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {tokenizer.eos_token}", special_tokens=special
    )
    assert tokenizer("Once")["input_ids"][-1] == tokenizer.eos_token_id
    monkeypatch.setattr(generate, "load", lambda *_, **__: (tokenizer, model))
    assert generate.main([str(model_dir), "Once upon a", "--max-new-tokens", "4"]) == 0
    answer = tokenizer.decode(output, skip_special_tokens=True).strip()
    assert capsys.readouterr().out == f"> Once upon a\n{answer}\n"
