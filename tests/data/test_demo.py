"""The demo data: made by its script byte for byte, and learnable as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fsdp2kit.config.schema import ChatDataConfig, ModelConfig
from fsdp2kit.data.documents import build_documents
from fsdp2kit.model.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "toml" / "demo"
FILES = ("chat.jsonl", "heldout.jsonl", *(f"tokenizer/{name}" for name in ("tokenizer.json", "tokenizer_config.json")))


def questions(name: str) -> list[str]:
    rows = [json.loads(line) for line in (DEMO / name).read_text().splitlines()]
    return [message["content"] for row in rows for message in row["messages"] if message["role"] == "user"]


def test_the_script_makes_these_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "make_demo.py"), "--out", str(tmp_path)], check=True)
    for name in (*FILES, "digits.jsonl", "tokenizer/chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes(), name


def test_no_question_is_both_learnt_and_held_out() -> None:
    learnt, held_out = questions("chat.jsonl"), questions("heldout.jsonl")
    assert len(set(learnt)) == len(learnt)
    assert not set(learnt) & set(held_out)


def test_the_demo_teaches_its_answers() -> None:
    tokenizer = build_tokenizer(ModelConfig(tokenizer=str(DEMO / "tokenizer")))
    section = ChatDataConfig(path=str(DEMO / "chat.jsonl"), seq_len=256)
    documents = build_documents(section, tokenizer=tokenizer)
    assert len(documents) == documents.report.rows == 600
    rows = [json.loads(line)["messages"] for line in (DEMO / "chat.jsonl").read_text().splitlines()]
    for row, (ids, supervised) in zip(rows, map(documents.__getitem__, range(len(documents))), strict=True):
        answers = [message["content"] + "<|im_end|>" for message in row if message["role"] == "assistant"]
        assert tokenizer.decode(ids[supervised]) == "".join(answers)
    assert documents.largest_id < len(tokenizer) <= 1024
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
