"""Templates that write the date write the day on which the run began, on whatever day it is resumed."""

from __future__ import annotations

import copy
import json
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from fsdp2kit.config.schema import ChatDataConfig, TrainingConfig
from fsdp2kit.data.build import Data, build_data
from fsdp2kit.data.template import Template, day_of, settle_day
from fsdp2kit.job.events import began
from tests.data.helpers import templates
from tests.data.helpers.families import SINGLE
from tests.data.helpers.templates import make_tokenizer

DATED = 'Today: {{ strftime_now("%d %b %Y") }}\n' + templates.CHATML


class Config(TrainingConfig):
    data: ChatDataConfig = ChatDataConfig()  # type: ignore[assignment]


@pytest.fixture
def tokenizer():
    return make_tokenizer(DATED)


def read(tmp_path: Path, tokenizer) -> tuple[Data, str]:
    """The data of a run, and the text of its first pack."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": SINGLE}) + "\n")
    values = {
        "recipe": "sft",
        "run": {"dir": str(tmp_path / "run")},
        "data": {"path": str(tmp_path / "rows.jsonl"), "seq_len": 256},
        "train": {"steps": 1, "global_batch_size": 1},
    }
    data = build_data(Config.model_validate(values), tokenizer=copy.deepcopy(tokenizer))
    return data, tokenizer.decode(np.asarray(data.loader.batch(0)[0].input_ids)[0])


def begin_on(tmp_path: Path, day: datetime) -> None:
    (tmp_path / "run").mkdir(exist_ok=True)
    lines = [{"time": (day + timedelta(days=at)).timestamp(), "event": "start", "start": at + 1} for at in range(2)]
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_that_begins_writes_what_transformers_writes_today(tmp_path: Path, tokenizer) -> None:
    before = date.today()
    _, text = read(tmp_path, tokenizer)
    expected = tokenizer.apply_chat_template(SINGLE, tokenize=False)
    assert date.today() != before or text.startswith(expected.strip())
    assert f"Today: {before:%d %b %Y}" in text or date.today() != before


def test_a_run_that_is_resumed_writes_the_day_on_which_it_began(tmp_path: Path, tokenizer) -> None:
    plain = make_tokenizer(templates.CHATML)
    today, undated = read(tmp_path, tokenizer)[0], read(tmp_path, plain)[0]
    begin_on(tmp_path, datetime(2025, 3, 7, 23, 59))

    data, text = read(tmp_path, tokenizer)

    assert "Today: 07 Mar 2025" in text
    assert data.fingerprint != today.fingerprint, "the cache has tokens of another day"
    assert data.fingerprint == read(tmp_path, tokenizer)[0].fingerprint
    assert read(tmp_path, plain)[0].fingerprint == undated.fingerprint


def test_no_text_depends_on_the_hour(tokenizer) -> None:
    tokenizer.chat_template = '{{ strftime_now("%Y-%m-%d %H:%M:%S") }}'
    text = Template(tokenizer, tools=None, variables={}, where="x").render(SINGLE)
    assert text == f"{day_of(tokenizer)} 00:00:00"


@pytest.mark.parametrize("text", [None, "", "no JSON\n", "[1]\n", '{"time": null}\n'])
def test_a_run_whose_begin_cannot_be_read_begins_today(tmp_path: Path, tokenizer, text: str | None) -> None:
    if text is not None:
        (tmp_path / "events.jsonl").write_text(text)
    assert began(tmp_path) is None
    before = date.today()
    settle_day(tokenizer, tmp_path)
    assert before <= day_of(tokenizer) <= date.today()
