"""Contradictions in ``[data]`` and ``[eval]`` are refused before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli

from fsdp2kit.config import load_config
from fsdp2kit.config.checks import check_config
from fsdp2kit.config.load import dump_toml
from fsdp2kit.config.schema import ChatDataConfig, TextDataConfig, TrainingConfig
from fsdp2kit.errors import UserError


class Chat(TrainingConfig):
    data: ChatDataConfig = ChatDataConfig()


class Text(TrainingConfig):
    data: TextDataConfig = TextDataConfig()


def config_of(folder: Path, schema: type[TrainingConfig] = Chat, **sections):
    values = {"recipe": "x", "model": {"config": {"model_type": "llama"}, "weights": "random"}, "train": {"steps": 1}}
    return load_config(schema, {**values, **sections}, source=folder / "x.toml")


A, B = {"path": "a.jsonl"}, {"path": "b.jsonl"}
CASES = {
    "preference": ({"data": {"format": "preference", "path": "a"}}, 'data.columns.messages = "chosen"'),
    "path and sources": ({"data": {"path": "a", "sources": [A]}}, "make data.path one of the sources"),
    "one weight of two": ({"data": {"sources": [{**A, "weight": 1}, B]}}, "1 of 2 have a weight"),
    "weights and epochs": ({"data": {"sources": [{**A, "weight": 1}, {**B, "epochs": 2}]}}, "1 of 2 have epochs"),
    "two of a name": ({"data": {"sources": [{**A, "name": "x"}, {**B, "name": "x"}]}}, "two are named 'x'"),
    "a name for two of three": (
        {"data": {"sources": [{**A, "name": "b-2"}, B, {"path": "c/b.jsonl"}]}},
        "two are named 'b-2'",
    ),
    "stream for epochs": ({"data": {**A, "streaming": True}, "train": {"epochs": 1}}, "give train.steps"),
    "stream of nothing": ({"data": {"streaming": True}}, "data.path: is required"),
    "stream with epochs": ({"data": {"streaming": True, "sources": [{**A, "epochs": 1}]}}, "give weights"),
    "stream's split": ({"data": {**A, "streaming": True}, "eval": {"every": 1, "split": "test"}}, "give eval.path"),
    "same set": ({"data": A, "eval": {"every": 1, "sets": {"a": A}}}, "on the training data itself"),
    "same source": ({"data": {"sources": [A, B]}, "eval": {"every": 1, "path": "b.jsonl"}}, "training data itself"),
    "split of a mix": ({"data": {"sources": [A, B]}, "eval": {"every": 1, "split": "test"}}, "does not say which"),
    "part of a slice": ({"data": A, "eval": {"every": 1, "split": "train[:5%]"}}, "on the training data itself"),
    "whole of a slice": ({"data": {**A, "split": "train[5%:]"}, "eval": {"every": 1}}, "on the training data itself"),
    "share of other data": ({"data": A, "eval": {"every": 1, "path": "b", "split": 0.1}}, "eval.path: is given"),
    "rows of a stream": ({"data": {**A, "streaming": True}, "eval": {"every": 1, "split": 5}}, "give a share"),
    "share of a stream": ({"data": {**A, "streaming": True}, "eval": {"every": 1, "split": 0.1}}, "set eval.steps"),
    "slice of a stream": ({"data": {**A, "streaming": True, "split": "train[:9]"}}, "set data.limit"),
    "wrapped chats": ({"data": {**A, "wrap": "chat"}}, "data.wrap: \"chat\" with data.format = 'chat'"),
    "column of another format": (
        {"data": {**A, "columns": {"prompt": "q"}}},
        "data.columns.prompt: 'q' .* reads no prompt; leave it out, or set data.format = \"prompt_completion\"",
    ),
    "column of another format in a part": (
        {"data": {"sources": [{**A, "format": "text", "columns": {"messages": "m"}}, B]}},
        "data.columns.messages: 'm' with data.format = 'text', which reads no messages",
    ),
    "name beside sources": ({"data": {"name": "a", "sources": [A, B]}}, "data.name: 'a' with .* set config_name in"),
    "split beside sources": (
        {"data": {"split": "test", "sources": [A, B]}},
        "data.split: 'test' with .* set split in",
    ),
    "name of a share": (
        {"data": A, "eval": {"every": 1, "name": "a", "split": 0.1}},
        "eval.name: 'a', and eval.split",
    ),
    "patience without": ({"data": A, "eval": {"patience": 2}}, "set eval.every"),
}


@pytest.mark.parametrize("name", CASES)
def test_contradictions(name: str, tmp_path: Path) -> None:
    sections, what = CASES[name]
    with pytest.raises(UserError, match=what):
        check_config(config_of(tmp_path, **sections), world_size=1, local_world_size=1)


RANDOM = {"format": "synthetic"}
UNUSED = {
    "path": ({"data": {**RANDOM, "path": "a.jsonl"}}, r"data\.path: \".*a.jsonl\" with data.format = 'synthetic'"),
    "split": ({"data": {**RANDOM, "split": "test"}}, r"data\.split: \"test\" with data.format = 'synthetic'"),
    "limit": ({"data": {**RANDOM, "limit": 5}}, r"data\.limit: 5 with .*set data.format = \"text\" or \"tokens\""),
    "name": ({"data": {**RANDOM, "name": "main"}}, r"data\.name: "),
    "sources": ({"data": {**RANDOM, "sources": [A]}}, r"data\.sources: 1 entries with data.format = 'synthetic'"),
    "overlong": ({"data": {**RANDOM, "overlong": "drop"}}, r"data\.overlong: "),
    "workers": ({"data": {**RANDOM, "workers": 2}}, r"data\.workers: 2 "),
    "train_on": ({"data": {**RANDOM, "train_on": "all"}}, r"data\.train_on: "),
    "wrap": ({"data": {**RANDOM, "wrap": "chat"}}, r"data\.wrap: "),
    "column": ({"data": {**RANDOM, "columns": {"text": "body"}}}, r"data\.columns\.text: "),
    "eval.path": ({"data": RANDOM, "eval": {"every": 1, "path": "a.jsonl"}}, r"eval\.path: .*'synthetic'"),
    "eval.sets": ({"data": RANDOM, "eval": {"every": 1, "sets": {"x": A}}}, r"eval\.sets\.x\.path: .*'synthetic'"),
    "tokens": (
        {"data": {**A, "format": "tokens", "train_on": "last"}},
        r"data\.train_on: \"last\" with .*'tokens', which",
    ),
    "text": ({"data": {**A, "format": "text", "train_on": "last"}}, r"data\.train_on: \"last\" with .*'text', which"),
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_key_that_the_format_does_not_use_is_refused(name: str, tmp_path: Path) -> None:
    sections, what = UNUSED[name]
    with pytest.raises(UserError, match=what):
        check_config(config_of(tmp_path, Text, **sections), world_size=1, local_world_size=1)


def test_a_resolved_config_loads_again_and_says_what_is_done_anyway(tmp_path: Path) -> None:
    everything = [{**A, "format": one, "train_on": "all"} for one in ("text", "tokens")]
    for data in (RANDOM, *everything):
        config = config_of(tmp_path, Text, data={**data, "seq_len": 64, "pack": False, "shuffle": False})
        again = load_config(Text, tomli.loads(dump_toml(config)), source=tmp_path / "config.toml")
        check_config(again, world_size=1, local_world_size=1)
        assert again == config


def test_the_json_schema_refuses_what_random_tokens_do_not_use() -> None:
    schema = TextDataConfig.model_json_schema()
    assert schema["if"]["required"] == ["format"]
    unused = schema["then"]["properties"]
    assert (unused["path"], unused["split"]) == (False, {"const": "train"})
    assert not {"seq_len", "pack", "shuffle", "prefetch", "format"} & unused.keys()
    assert "then" not in ChatDataConfig.model_json_schema()


def test_a_configuration_of_the_training_data_is_not_the_training_data(tmp_path: Path) -> None:
    data = {"path": "a", "name": "main"}
    for evaluation in ({"name": "socratic"}, {"path": "a", "name": "socratic"}, {"sets": {"x": {"path": "a"}}}):
        config = config_of(tmp_path, data=data, eval={"every": 1, **evaluation})
        check_config(config, world_size=1, local_world_size=1)
    for evaluation in ({"name": "main"}, {"path": "a", "name": "main"}, {"sets": {"x": data}}):
        config = config_of(tmp_path, data=data, eval={"every": 1, **evaluation})
        with pytest.raises(UserError, match="on the training data itself"):
            check_config(config, world_size=1, local_world_size=1)


def test_a_column_that_a_part_reads_may_be_named_for_all(tmp_path: Path) -> None:
    columns = {"messages": "m", "text": "t"}
    config = config_of(tmp_path, data={"columns": columns, "sources": [A, {**B, "format": "text"}]})
    check_config(config, world_size=1, local_world_size=1)


@pytest.mark.parametrize("split", [0.02, 500, "train[95%:]"])
def test_what_is_held_out_of_the_training_data(split: float | str, tmp_path: Path) -> None:
    data = {**A, "split": "train[:95%]"} if isinstance(split, str) else A
    config = config_of(tmp_path, data=data, eval={"every": 1, "split": split})
    check_config(config, world_size=1, local_world_size=1)
    assert (type(config.eval.split), config.eval.split) == (type(split), split)
    text = config_of(tmp_path, Text, data={"format": "synthetic"}, eval={"split": 0.1})
    with pytest.raises(UserError, match=r"eval\.split: 0\.1 of .* generated"):
        check_config(text, world_size=1, local_world_size=1)
    with pytest.raises(UserError, match=r"eval\.split: 1\.5 is not accepted"):
        config_of(tmp_path, data=A, eval={"split": 1.5})


def test_a_synthetic_stream(tmp_path: Path) -> None:
    sections = {"data": {"format": "synthetic", "streaming": True}}
    with pytest.raises(UserError, match="which is not read"):
        check_config(config_of(tmp_path, Text, **sections), world_size=1, local_world_size=1)


def test_paths_in_lists_and_tables_are_relative_to_the_toml(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        data={"sources": [{"path": "data/a.jsonl"}, {"path": "s3://bucket/b.jsonl"}]},
        eval={"every": 1, "sets": {"code": {"path": "held/c.jsonl"}}},
    )
    assert [part.path for part in config.data.sources] == [str(tmp_path / "data/a.jsonl"), "s3://bucket/b.jsonl"]
    assert config.eval.sets["code"].path == str(tmp_path / "held/c.jsonl")
    check_config(config, world_size=1, local_world_size=1)


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"data": {"sources": [{"paht": "a"}]}}, r"data\.sources\.0\.paht: unknown key 'paht'.*did you mean .*path"),
        ({"data": {"sources": [{"path": "a", "weight": "x"}]}}, r"data\.sources\.0\.weight.*Share of the mix"),
        ({"eval": {"sets": {"code": {"pth": "a"}}}}, r"eval\.sets\.code\.pth: unknown key"),
        ({"data": {"columns": {"mesages": "a"}}}, r"did you mean data\.columns\.messages"),
    ],
)
def test_typos_in_them_are_named(sections: dict, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        config_of(tmp_path, **sections)


def test_sources_have_names_of_their_own(tmp_path: Path) -> None:
    """Their losses and what is held out of them go by name."""
    parts = [{"path": "a/train.jsonl"}, {"path": "b/train.jsonl"}, {"path": "code.jsonl"}, {**A, "name": "x"}]
    assert config_of(tmp_path, data={"sources": parts}).data.source_names() == ["train-0", "train-1", "code", "x"]
