"""An export's tokenizer has the files of its source; what was changed is written where the source has it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.model.tokenizer import build_tokenizer, new_tokens
from fsdp2kit.model.tokenizer_files import save_tokenizer
from tests.data.helpers.templates import CHATML, LLAMA3, make_tokenizer
from tests.model.helpers import old_python, save_base

TEXT = "Is water wet? <|im_start|>Yes, é.<|im_end|>"
CHAT = [{"role": "user", "content": "Is water wet?"}, {"role": "assistant", "content": "Yes."}]
OTHERS = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "tekken.json", "x.tiktoken")


def in_old_form(path: Path, *, template: str | None = None, decoder: bool = True) -> Path:
    """Give a tokenizer that transformers 5 saved the form of transformers 4, by hand, and files of other readers."""
    (path / "chat_template.jinja").unlink(missing_ok=True)
    fields = json.loads((path / "tokenizer_config.json").read_text())
    fields.pop("backend", None)
    fields |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if template is not None:
        fields["chat_template"] = template
    if decoder:
        tokens = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
        fields["added_tokens_decoder"] = {str(one.pop("id")): one for one in tokens}
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    special = {key: value for key, value in fields.items() if key in ("bos_token", "eos_token")}
    (path / "special_tokens_map.json").write_text(json.dumps(special))
    for name in OTHERS:
        (path / name).write_text("{}")
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {one.relative_to(path).as_posix(): one.read_bytes() for one in path.rglob("*") if one.is_file()}


def check_same(out: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    read = AutoTokenizer.from_pretrained(out)
    assert read(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert read.special_tokens_map == tokenizer.special_tokens_map
    assert read.chat_template == tokenizer.chat_template
    if tokenizer.chat_template:
        assert read.apply_chat_template(CHAT, tokenize=False) == tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    make_tokenizer(CHATML).save_pretrained(tmp_path / "chat")
    return in_old_form(tmp_path / "chat", template=CHATML)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = save_base(tmp_path, "smollm2")
    (path / "model.safetensors").unlink()
    return in_old_form(path)


def test_what_was_not_changed_is_copied(chat: Path, tmp_path: Path) -> None:
    (chat / "modeling.py").write_text("of the model")
    tokenizer = build_tokenizer(ModelConfig(tokenizer=str(chat)))
    out = tmp_path / "out"
    out.mkdir()
    (out / "vocab.txt").write_text("of another tokenizer")
    save_tokenizer(tokenizer, out)
    expected = contents(chat)
    del expected["modeling.py"]
    assert contents(out) == expected
    check_same(out, tokenizer)


@pytest.mark.parametrize("place", ["config", "jinja", "both", "list", "none", "processor"])
def test_a_new_template_is_written_where_the_source_has_one(place: str, chat: Path, tmp_path: Path) -> None:
    fields = json.loads((chat / "tokenizer_config.json").read_text())
    if place in ("jinja", "none", "processor"):
        del fields["chat_template"]
    if place in ("jinja", "both"):
        (chat / "chat_template.jinja").write_text(CHATML)
    if place == "processor":
        (chat / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    if place == "list":
        fields["chat_template"] = [{"name": name, "template": CHATML} for name in ("default", "tool_use")]
    (chat / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "mine.jinja").write_text(LLAMA3)
    tokenizer = build_tokenizer(ModelConfig(tokenizer=str(chat), chat_template=str(tmp_path / "mine.jinja")))
    out = tmp_path / "out"
    out.mkdir()
    save_tokenizer(tokenizer, out)
    found = json.loads((out / "tokenizer_config.json").read_text())
    assert ("chat_template" in found) == (place != "jinja")
    assert found.get("chat_template", LLAMA3) == LLAMA3
    assert (out / "chat_template.jinja").exists() == (place in ("jinja", "both"))
    if place == "processor":
        assert json.loads((out / "chat_template.json").read_text()) == {"chat_template": LLAMA3}
    check_same(out, tokenizer)
    assert (out / "tokenizer.model").exists()
    if place == "none":  # a processor reads no tokenizer's config
        save_tokenizer(tokenizer, out, has_processor=True)
        assert (out / "chat_template.jinja").read_text() == LLAMA3


@pytest.mark.parametrize("decoder", [True, False])
def test_new_tokens_are_added_and_nothing_else(decoder: bool, base: Path, tmp_path: Path) -> None:
    if not decoder:
        in_old_form(base, decoder=False)
        fields = json.loads((base / "tokenizer_config.json").read_text())
        fields.pop("added_tokens_decoder")
        (base / "tokenizer_config.json").write_text(json.dumps(fields))
    tokenizer = build_tokenizer(ModelConfig(path=str(base), chat_template="chatml"))
    new = new_tokens(tokenizer)
    assert len(new) == 2
    out = tmp_path / "out"
    out.mkdir()
    save_tokenizer(tokenizer, out)
    check_same(out, tokenizer)
    before, after = (json.loads((path / "tokenizer.json").read_text()) for path in (base, out))
    assert [token["id"] for token in after["added_tokens"][-2:]] == list(new)
    assert after["added_tokens"][:-2] == before["added_tokens"]
    assert {**after, "added_tokens": []} == {**before, "added_tokens": []}
    before, after = (json.loads((path / "tokenizer_config.json").read_text()) for path in (base, out))
    changed = {key for key in after if before.get(key) != after[key]}
    assert changed == {"chat_template", *(["added_tokens_decoder"] if decoder else [])}
    if decoder:
        assert after["added_tokens_decoder"].keys() - before["added_tokens_decoder"].keys() == set(map(str, new))
    assert set(json.loads((out / "added_tokens.json").read_text()).values()) == set(new)


def test_other_special_tokens_and_sides_are_written(chat: Path, tmp_path: Path) -> None:
    """As loops of their own do: ``tokenizer.pad_token = tokenizer.eos_token``."""
    tokenizer: Any = AutoTokenizer.from_pretrained(chat)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    tokenizer.add_tokens(["<tool>"])
    out = tmp_path / "out"
    out.mkdir()
    save_tokenizer(tokenizer, out)
    check_same(out, tokenizer)
    found = json.loads((out / "tokenizer_config.json").read_text())
    assert (found["tokenizer_class"], found["padding_side"]) == ("PreTrainedTokenizerFast", "left")
    assert json.loads((out / "special_tokens_map.json").read_text())["pad_token"] == tokenizer.eos_token
    assert AutoTokenizer.from_pretrained(out).padding_side == "left"
    assert (out / "tokenizer.model").exists()


def test_a_tokenizer_of_memory_is_written_for_old_readers_too(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    save_tokenizer(tokenizer, tmp_path)
    check_same(tmp_path, tokenizer)
    found = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(found.get("extra_special_tokens"), list)


def test_files_that_give_another_tokenizer_are_not_kept(chat: Path, tmp_path: Path) -> None:
    """What was loaded is what is exported, also where the files changed since."""
    tokenizer = AutoTokenizer.from_pretrained(chat)
    fields = json.loads((chat / "tokenizer.json").read_text())
    fields["normalizer"] = {"type": "Lowercase"}
    (chat / "tokenizer.json").write_text(json.dumps(fields))
    (tmp_path / "out").mkdir()
    save_tokenizer(tokenizer, tmp_path / "out")
    check_same(tmp_path / "out", tokenizer)


_OLD_READER = """
import json, sys
from transformers import AutoTokenizer
path, text, chat = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(path)
said = tokenizer.apply_chat_template(chat, tokenize=False)
print(json.dumps([tokenizer(text).input_ids, said, tokenizer(said).input_ids, tokenizer.special_tokens_map]))
"""


@pytest.mark.timeout(900)
def test_transformers_4_makes_the_same_tokens(chat: Path, base: Path, tmp_path: Path) -> None:
    python = old_python()
    (tmp_path / "mine.jinja").write_text(LLAMA3)
    memory = make_tokenizer(CHATML)
    memory.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    padded: Any = AutoTokenizer.from_pretrained(chat)
    padded.pad_token = "<pad>"
    padded.add_tokens(["<pad>"], special_tokens=True)
    without = shutil.copytree(base, tmp_path / "without")
    fields = json.loads((base / "tokenizer_config.json").read_text())
    fields.pop("added_tokens_decoder")
    (without / "tokenizer_config.json").write_text(json.dumps(fields))
    for number, tokenizer in enumerate(
        (
            build_tokenizer(ModelConfig(path=str(chat))),
            build_tokenizer(ModelConfig(path=str(chat), chat_template=str(tmp_path / "mine.jinja"))),
            build_tokenizer(ModelConfig(path=str(base), chat_template="chatml")),
            build_tokenizer(ModelConfig(path=str(without), chat_template="chatml")),
            memory,
            padded,
        )
    ):
        out = tmp_path / f"out{number}"
        out.mkdir()
        save_tokenizer(tokenizer, out)
        said = subprocess.run(
            [python, "-c", _OLD_READER, str(out), TEXT, json.dumps(CHAT)], check=True, capture_output=True, text=True
        ).stdout
        ids, text, of_text, special = json.loads(said)
        assert ids == tokenizer(TEXT).input_ids, number
        assert text == tokenizer.apply_chat_template(CHAT, tokenize=False), number
        assert of_text == tokenizer(text).input_ids, number
        for name in ("bos_token", "eos_token", "pad_token"):
            assert special.get(name) == tokenizer.special_tokens_map.get(name), number
