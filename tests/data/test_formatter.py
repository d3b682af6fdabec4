"""`data.formatter`: rows that a function makes train as rows that were written so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp2kit.config import load_config
from fsdp2kit.config.schema import ChatDataConfig, TrainingConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.data.checks import check_first_rows
from fsdp2kit.data.code import code_digests
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer
from tests.data.helpers import templates
from tests.data.helpers.files import write_rows
from tests.data.helpers.templates import make_tokenizer


class Config(TrainingConfig):
    data: ChatDataConfig = ChatDataConfig()


CODE = """
from dataclasses import dataclass
from helper import shout

@dataclass
class Pair:
    asked: str

def chat(row):
    pair = Pair(row.pop("q"))
    return [{"role": "user", "content": pair.asked}, {"role": "assistant", "content": shout(row["a"])}]

def columns(row):
    return {"messages": chat(row), "tools": None}

def text(row):
    return f"{row['q']} {row['a']}"

def pair(row):
    return {"prompt": row["q"], "completion": row["a"]}

def ids(row):
    return {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}

def nothing(row):
    return None if row["q"] == "q3" else chat(row)

def broken(row):
    return row["absent"]

async def late(row):
    return chat(row)

number = 3
"""
ROWS = [{"q": f"q{number}", "a": f"a{number}"} for number in range(12)]


def said(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"].upper()}]


PLAIN: dict[str, tuple[str, Any]] = {
    "chat": ("chat", lambda row: {"messages": said(row)}),
    "columns": ("chat", lambda row: {"messages": said(row)}),
    "text": ("text", lambda row: {"text": f"{row['q']} {row['a']}"}),
    "pair": ("prompt_completion", lambda row: {"prompt": row["q"], "completion": row["a"]}),
    "ids": ("tokens", lambda row: {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "helper.py").write_text("def shout(text): return text.upper()\n")
    write_rows(tmp_path / "rows.jsonl", ROWS)
    make_tokenizer(templates.CHATML).save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def config_of(folder: Path, data: dict[str, Any], **sections: Any) -> Any:
    model = {"tokenizer": "tokenizer", "weights": "random", "config": {"model_type": "llama", "vocab_size": 512}}
    data = {"seq_len": 64, "path": "rows.jsonl", **data}
    data = {name: value for name, value in data.items() if value is not None}
    values = {"recipe": "x", "model": model, "run": {"dir": str(folder / "run")}, "train": {"steps": 2}, **sections}
    return load_config(Config, {**values, "data": data}, source=folder / "x.toml")


def batches_of(config: Any) -> list[np.ndarray]:
    data = build_data(config, tokenizer=build_tokenizer(config.model)).batches()
    return [batch.input_ids for index in range(2) for batch in data.batch(index)]


def same(config: Any, other: Any) -> bool:
    return all(np.array_equal(one, two) for one, two in zip(batches_of(config), batches_of(other), strict=True))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_rows_are_those_that_the_function_makes(name: str, streaming: bool, folder: Path) -> None:
    form, make = PLAIN[name]
    write_rows(folder / "plain.jsonl", [make(row) for row in ROWS])
    options = {"format": form, "streaming": streaming}
    made = config_of(folder, {**options, "formatter": f"mine.py:{name}"})
    assert same(made, config_of(folder, {**options, "path": "plain.jsonl"}))
    assert check_first_rows(made) == []


def test_parts_have_formatters_of_their_own_and_workers_run_them(folder: Path) -> None:
    write_rows(folder / "chats.jsonl", [{"messages": said(row)} for row in ROWS])
    write_rows(folder / "texts.jsonl", [PLAIN["text"][1](row) for row in ROWS])
    rows = {"path": "rows.jsonl"}
    mixed = [{**rows, "name": "a"}, {**rows, "name": "b", "format": "text", "formatter": "mine.py:text"}]
    plain = [{"path": "chats.jsonl", "name": "a"}, {"path": "texts.jsonl", "name": "b", "format": "text"}]
    made = config_of(folder, {"path": None, "sources": mixed, "formatter": "mine.py:chat", "workers": 1})
    assert same(made, config_of(folder, {"path": None, "sources": plain}))
    sets = {"x": {"path": "rows.jsonl", "split": "train[:5]"}}
    held_out = {"every": 1, "sets": sets}
    made = config_of(folder, {"path": "rows.jsonl", "split": "train[5:]", "formatter": "mine.py:chat"}, eval=held_out)
    found = build_data(made, tokenizer=build_tokenizer(made.model)).held_out["x"]
    assert found.parts[0].documents.report.rows == 5


def test_other_code_gives_other_data(folder: Path) -> None:
    def fingerprint(streaming: bool) -> str:
        config = config_of(folder, {"formatter": "mine.py:chat", "streaming": streaming})
        return build_data(config, tokenizer=build_tokenizer(config.model)).fingerprint

    before = [fingerprint(False), fingerprint(True)]
    assert before == [fingerprint(False), fingerprint(True)]
    file = folder / "mine.py"
    file.write_text(CODE.replace('shout(row["a"])', 'shout(row["a"]) + "!"'))
    os.utime(file, ns=(1, 1))
    after = [fingerprint(False), fingerprint(True)]
    assert before[0] != after[0]
    assert before[1] != after[1]
    (folder / "helper.py").write_text("def shout(text): return text.lower()\n")
    assert fingerprint(True) != after[1], "what it imports from beside it counts, too"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nothing", r"rows\.jsonl:4: data\.formatter mine\.py:nothing returned None; return a dict"),
        ("broken", r"rows\.jsonl:1: data\.formatter mine\.py:broken raised KeyError: 'absent' at mine\.py:\d+; mend"),
        ("late", r"rows\.jsonl:1: data\.formatter mine\.py:late returned a coroutine"),
        ("number", r"data\.formatter: .*mine\.py:number: is of type int, and no function"),
        ("absent", r"data\.formatter: .*mine\.py:absent: cannot be imported \(AttributeError"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("workers", [0, 1])
def test_mistakes_name_the_row_and_the_function(name: str, what: str, workers: int, folder: Path) -> None:
    config = config_of(folder, {"formatter": f"mine.py:{name}", "workers": workers})
    with pytest.raises(UserError, match=what):
        build_data(config, tokenizer=build_tokenizer(config.model))


def test_a_file_that_is_not_there_or_not_python(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.formatter: .*no such file"):
        config_of(folder, {"formatter": "absent.py:chat"})
    (folder / "bad.py").write_text("def chat(row):\n    return [\n")
    config = config_of(folder, {"formatter": "bad.py:chat"})
    with pytest.raises(UserError, match=r"data\.formatter: .*cannot be imported \(SyntaxError: .* at bad\.py:2\)"):
        build_data(config, tokenizer=build_tokenizer(config.model))


def test_the_resolved_config_loads_again(folder: Path) -> None:
    config = config_of(folder, {"formatter": "mine.py:chat"})
    assert config.data.formatter == f"{folder}/mine.py:chat"
    assert json.loads(config.model_dump_json())["data"]["formatter"] == config.data.formatter


def test_an_import_for_types_alone_is_no_code_of_a_function(tmp_path: Path) -> None:
    types = "if TYPE_CHECKING:\n    import typed\nelse:\n    import real\n"
    for name, source in {"main.py": f"{types}def f(row): ...\n", "typed.py": "", "real.py": ""}.items():
        (tmp_path / name).write_text(source)
    assert [*code_digests(f"{tmp_path}/main.py:f")] == ["main.py", "real.py"]
