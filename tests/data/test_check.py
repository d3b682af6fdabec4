"""``--check`` opens the first rows of everything that is on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.config import load_config
from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import ChatDataConfig, TextDataConfig, TrainingConfig
from fsdp2kit.data import checks
from fsdp2kit.data.build import build_data
from fsdp2kit.data.checks import check_first_rows, count_steps
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.planner.check import check_offline
from recipes import distill, grpo
from tests.data.helpers import templates
from tests.data.helpers.families import MULTI, SINGLE, tokenizer_of
from tests.data.helpers.files import write_rows
from tests.data.helpers.templates import make_tokenizer


class Config(TrainingConfig):
    data: ChatDataConfig = ChatDataConfig()


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512}


def config_of(
    folder: Path,
    kind: type = Config,
    *,
    template: str = templates.CHATML,
    config: dict = LLAMA,
    attention: str = "auto",
    **sections,
) -> Any:
    make_tokenizer(template).save_pretrained(folder / "tokenizer")
    model = {"tokenizer": "tokenizer", "weights": "random", "attention": attention, "config": config}
    values = {"recipe": "x", "model": model, "train": {"steps": 2}, **sections}
    return load_config(kind, values, source=folder / "x.toml")


def lines_of(folder: Path, *kind: type, **options) -> tuple[str, list[str]]:
    lines, unchecked = check_offline(config_of(folder, *kind, **options), MeshSizes(1, 2, 1))
    return "\n".join(lines), unchecked


def write(path: Path, *rows: dict) -> str:
    return str(write_rows(path, rows))


def test_good_rows_and_what_is_elsewhere(tmp_path: Path) -> None:
    sources = [{"path": write(tmp_path / "a.jsonl", {"messages": MULTI})}, {"path": "s3://bucket/b.jsonl"}]
    config = config_of(tmp_path, data={"sources": sources}, eval={"every": 1, "path": "some/dataset"})
    assert check_first_rows(config) == ["data.sources.1.path", "eval.path"]


def test_a_tokenizer_may_be_elsewhere_and_not_missing(tmp_path: Path) -> None:
    config = config_of(tmp_path, data={"path": write(tmp_path / "a.jsonl", {"messages": SINGLE})})
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"^model\.tokenizer: "):
        check_first_rows(config)
    model = config.model.model_copy(update={"tokenizer": "some/tokenizer"})
    assert check_first_rows(config.model_copy(update={"model": model})) == ["tokenizer"]


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
        check_first_rows(config_of(tmp_path, template=tokenizer_of("qwen3").chat_template, data={"path": path}))
    with pytest.raises(UserError, match="there are no rows"):
        check_first_rows(config_of(tmp_path, data={"path": write(tmp_path / "b.jsonl")}))


def test_steps_are_counted_where_all_data_is_here_and_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": [{"role": "user", "content": str(number)}, SINGLE[1]]} for number in range(11)]
    path = write(tmp_path / "a.jsonl", *rows[:10])
    train = {"epochs": 3, "global_batch_size": 4}
    data = {"path": path, "seq_len": 128, "pack": False}
    config = config_of(tmp_path, data=data, train=train)
    for limit in (checks._BYTES_COUNTED, 0):  # the second time from the cache
        monkeypatch.setattr(checks, "_BYTES_COUNTED", limit)
        _, epoch, total = count_steps(config)
        assert epoch.startswith("an epoch: 10 packs of 128 tokens")
        assert epoch.endswith("in 3 steps"), "two whole batches and a short one"
        assert total == "train: 9 steps"
    write(tmp_path / "a.jsonl", *rows)
    assert count_steps(config) == ["steps of an epoch not counted: data.path is 0 MiB to be tokenised"]
    monkeypatch.undo()
    schedule = {"warmup_steps": 9}
    with pytest.raises(UserError, match=r"warmup_steps: 9, but the whole run has 9 steps"):
        count_steps(config_of(tmp_path, data=data, train=train, lr_schedule=schedule))
    with pytest.raises(UserError, match=r"^data\.path: is required"):
        build_data(config_of(tmp_path, train=train), tokenizer=build_tokenizer(config.model))


def test_what_only_the_start_reads_is_said(tmp_path: Path) -> None:
    _, unchecked = lines_of(tmp_path, distill.Config, distill={"teacher": "some/teacher"})
    assert unchecked == ["distill.teacher"]
    with pytest.raises(UserError, match=r"^distill\.teacher: .*nowhere is not a directory"):
        lines_of(tmp_path, distill.Config, distill={"teacher": str(tmp_path / "nowhere")})


def test_a_teacher_is_looked_at(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    AutoConfig.for_model(**LLAMA).save_pretrained(same)
    make_tokenizer(templates.CHATML).save_pretrained(same)
    said, unchecked = lines_of(tmp_path, distill.Config, distill={"teacher": str(same)})
    assert (f"teacher: {same}, " in said, unchecked) == (True, [])
    AutoConfig.for_model(**LLAMA).save_pretrained(other)
    tokenizer = make_tokenizer(templates.CHATML)
    tokenizer.add_tokens(["<new>"])
    tokens = json.loads(tokenizer.backend_tokenizer.to_str())
    first, second = sorted(tokens["model"]["vocab"], key=tokens["model"]["vocab"].get)[5:7]
    vocabulary = tokens["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    make_tokenizer(templates.CHATML).save_pretrained(other)
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(UserError, match=r"^distill\.teacher: 2 of \d+ tokens have another id"):
        lines_of(tmp_path, distill.Config, distill={"teacher": str(other)})


@pytest.mark.full
def test_reward_functions_are_imported_and_take_the_columns(tmp_path: Path) -> None:
    rows = write(tmp_path / "prompts.jsonl", {"prompt": "Hi", "answer": "1"})
    for text, message in (
        ("def f(completions, answer, **columns): ...", None),
        ("def f(prompts, completions, completion_ids, truncated, answer): ...", None),
        ("", "AttributeError: module 'mine' has no attribute 'f'"),
        ("f = 3", "TypeError: it is of type int, no function"),
        (
            "def f(completions): ...",
            "TypeError: got an unexpected keyword argument 'answer': it is called with ",
        ),
        ("def f(completions, level, **columns): ...", "TypeError: missing a required argument: 'level'"),
    ):
        (tmp_path / "mine.py").write_text(text)
        given = {"reward": [{"function": "mine.py:f"}], "data": {"path": rows}}
        if message is None:
            assert "reward functions: f, imported" in lines_of(tmp_path, grpo.Config, **given)[0]
            continue
        with pytest.raises(UserError, match=f"^reward.0.function: .*{message}") as error:
            lines_of(tmp_path, grpo.Config, **given)
        assert "\n" not in str(error.value)


def test_flash_attention_passes_where_it_cannot_be_had(tmp_path: Path) -> None:
    said, unchecked = lines_of(tmp_path, attention="flash_attention_2")
    assert "attention: flash_attention_2 (as asked for)" in said
    assert unchecked == ["model.attention 'flash_attention_2'"]
    assert "data unchecked: none are given" in said
    for config, attention in (
        (LLAMA, "flash_attention_9"),
        ({"model_type": "bloom", "n_layer": 2}, "flash_attention_2"),
    ):
        with pytest.raises(UserError, match="cannot be built"):
            lines_of(tmp_path, config=config, attention=attention)


def test_the_plan_names_what_a_run_would_do(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"messages": SINGLE}] * 10)
    said, unchecked = lines_of(tmp_path, data={"path": path, "seq_len": 4096}, train={"steps": 2})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    assert f"parameters: {sum(parameter.numel() for parameter in model.parameters()):,}" in said
    for line in (
        "mesh: dp_replicate 1 × dp_shard 2 × cp 1",
        "units: 1 root, 1 Embedding, 2 LlamaDecoderLayer, 1 Linear",
        "attention: varlen (auto: packed documents need no mask)",
        "a step: 8 packs of 4,096 tokens, in 4 micro-batches of 1 on each of 2 data-parallel ranks",
        "data.seq_len 4,096 is beyond the 2,048 positions",
        "train: 2 steps",
    ):
        assert line in said
    assert unchecked == []


class Text(TrainingConfig):
    data: TextDataConfig = TextDataConfig()


@pytest.mark.parametrize("has_model", [True, False])
def test_random_tokens_are_named(has_model: bool, tmp_path: Path) -> None:
    config = config_of(tmp_path, Text, data={"format": "synthetic", "seq_len": 64})
    model = build_model(config.model) if has_model else None
    assert count_steps(config, model=model)[0].startswith('data: random tokens (data.format = "synthetic")')
