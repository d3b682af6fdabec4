"""``--check`` opens the first rows of everything that is on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp2kit.config import load_config
from fsdp2kit.config.schema import ChatDataConfig, TrainingConfig
from fsdp2kit.data.build import check_first_rows
from fsdp2kit.errors import UserError
from tests.data import families, templates
from tests.data.families import MULTI, SINGLE
from tests.data.templates import make_tokenizer


class Config(TrainingConfig):
    data: ChatDataConfig = ChatDataConfig()


def config_of(folder: Path, *, template: str = templates.CHATML, **sections) -> Config:
    make_tokenizer(template).save_pretrained(folder / "tokenizer")
    model = {"tokenizer": "tokenizer", "weights": "random", "config": {"model_type": "llama"}}
    values = {"recipe": "x", "model": model, "train": {"steps": 1}, **sections}
    return load_config(Config, values, source=folder / "x.toml")


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_good_rows_and_what_is_elsewhere(tmp_path: Path) -> None:
    sources = [{"path": write(tmp_path / "a.jsonl", {"messages": MULTI})}, {"path": "s3://bucket/b.jsonl"}]
    config = config_of(tmp_path, data={"sources": sources}, eval={"every": 1, "path": "some/dataset"})
    assert check_first_rows(config) == ["data.sources.1.path", "eval.path"]


@pytest.mark.parametrize("key", ["data.path", "eval.path", "eval.sets.code.path"])
def test_the_key_is_named(key: str, tmp_path: Path) -> None:
    good, missing = write(tmp_path / "a.jsonl", {"messages": SINGLE}), "missing.jsonl"
    sections: dict = {"data": {"path": good}, "eval": {"every": 1}}
    if key == "eval.sets.code.path":
        sections["eval"]["sets"] = {"code": {"path": missing}}
    else:
        sections[key.partition(".")[0]]["path"] = missing
    with pytest.raises(UserError, match=rf"^{key}: .*missing\.jsonl: no such file"):
        check_first_rows(config_of(tmp_path, **sections))


def test_a_row_that_cannot_be_learnt_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": SINGLE}, {"messages": MULTI})
    with pytest.raises(UserError, match=r"a\.jsonl:2: .*data\.train_on"):
        check_first_rows(config_of(tmp_path, template=families.QWEN3.source(marked=False), data={"path": path}))
    with pytest.raises(UserError, match="there are no rows"):
        check_first_rows(config_of(tmp_path, data={"path": write(tmp_path / "b.jsonl")}))
