"""From TOML and overrides to a config: unknown keys, overrides, input paths, and back to a TOML."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.config import TrainingConfig, load_config
from fsdp2kit.config.load import dump_toml, parse_override, read_toml
from fsdp2kit.config.schema import AdamWConfig
from fsdp2kit.config.sections.lr_schedule import PlainScheduleConfig, WSDScheduleConfig
from fsdp2kit.config.sections.optimizer import MuonConfig
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import to_path
from fsdp2kit.run import find_recipe, find_toml


def load(values: dict[str, Any], *overrides: str, source: str | Path = "run.toml") -> TrainingConfig:
    return load_config(TrainingConfig, {"recipe": "sft", **values}, source=Path(source), overrides=overrides)


def error_of(values: dict[str, Any], *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load(values, *overrides)
    return caught.value


# --- reading -------------------------------------------------------------------------------------------------------


def test_read_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.toml: no such file"):
        read_toml(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("[train]\nsteps = \n")
    with pytest.raises(UserError, match=r"bad\.toml: not valid TOML: .*line 2"):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'\n")
    for unreadable in (tmp_path, tmp_path / "latin.toml"):
        with pytest.raises(UserError, match="cannot be read"):
            read_toml(unreadable)


# --- unknown and missing keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "where", "todo"),
    [
        ({"trian": {"steps": 1}}, "trian", "did you mean train?"),
        ({"train": {"step": 1}}, "train.step", "did you mean train.steps?"),
        ({"train": {"global-batch-size": 1}}, "train.global-batch-size", "did you mean train.global_batch_size?"),
        ({"train": {"lr": 1e-3}}, "train.lr", "did you mean optimizer.lr?"),
        ({"lr": 1e-3}, "lr", "did you mean optimizer.lr?"),
        # The very name elsewhere is nearer than one here that resembles it ("steps").
        ({"train": {"eps": 1e-3}}, "train.eps", "did you mean optimizer.eps?"),
        # The same section before others, as a TOML writes it.
        ({"eval": {"format": "chat"}}, "eval.format", "did you mean eval.sets.NAME.format?"),
        ({"train": {"temperature": 1.0}}, "train.temperature", "did you mean data.temperature?"),
        ({"compile": {"int": 1}}, "compile.int", "known here: enabled"),
        ({"mesh": {"zzz": 1}}, "mesh.zzz", "known here: dp_replicate, dp_shard, cp, ep"),
    ],
)
def test_an_unknown_key_names_the_nearest(values: dict, where: str, todo: str) -> None:
    error = error_of(values)
    assert error.where == f"run.toml: {where}"
    assert error.what.startswith("unknown ")
    assert error.todo == todo


def test_a_retired_key_says_what_is_done_instead() -> None:
    error = error_of({"model": {"loss_kernel": "liger"}})
    assert (error.where, error.what) == ("run.toml: model.loss_kernel", "was removed")
    assert error.todo.startswith("leave it out; the loss is computed in chunks")
    for value in ("auto", "chunked"):  # what is done now
        assert load({"model": {"loss_kernel": value}}) == load({}, f"model.loss_kernel={value}") == load({})
    assert error_of({}, "model.loss_kernel=torch").where == "override model.loss_kernel"


# By what a TOML says: where the mistake is, what it is, and what to do.
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "a key of another optimizer": (
        {"optimizer": {"muon_momentum": 0.9}},
        "optimizer.muon_momentum: not a key of optimizer.name = 'adamw'; leave it out, or set optimizer.name = 'muon'",
    ),
    "nearly one": (
        {"optimizer": {"name": "adamw_8bit", "momentum": 0.9}},
        "unknown key 'momentum'; did you mean optimizer.muon_momentum, of optimizer.name = 'muon'?",
    ),
    "a phase of another schedule": (
        {"lr_schedule": {"decay_steps": 5}},
        "lr_schedule.decay_steps: not a key of lr_schedule.name = 'cosine'; "
        "leave it out, or set lr_schedule.name = 'wsd'",
    ),
    "a floor of other schedules": (
        {"lr_schedule": {"name": "linear", "min_lr_ratio": 0.1}},
        "lr_schedule.min_lr_ratio: not a key of lr_schedule.name = 'linear'; "
        "leave it out, or set lr_schedule.name = 'cosine' or 'wsd'",
    ),
    "no such optimizer": (
        {"optimizer": {"name": "adamx", "lr": 1.0}},
        "optimizer.name: 'adamx' is not accepted: input should be 'adamw', 'adamw_bf16', 'adamw_8bit' or 'muon'; "
        'name: "adamw" (decoupled',
    ),
    "no name": ({"optimizer": {"name": ["adamw"]}}, "optimizer.name: ['adamw'] is not accepted: "),
    "a wrong value": (
        {"lr_schedule": {"name": "wsd", "decay_steps": 0}},
        "lr_schedule.decay_steps: 0 is not accepted: input should be greater than 0; decay_steps: Steps of the final",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_key_belongs_to_a_variant_of_its_section(name: str) -> None:
    values, says = VARIANTS[name]
    assert says in str(error_of(values))


def test_a_default_of_another_variant_changes_nothing() -> None:
    values = {"optimizer": {"muon_momentum": 0.95}, "lr_schedule": {"name": "linear", "min_lr_ratio": 0.0}}
    config = load(values)
    assert (config.optimizer, config.lr_schedule) == (AdamWConfig(), PlainScheduleConfig(name="linear"))
    assert error_of(values, "optimizer.muon_momentum=0.95").where == "override optimizer.muon_momentum"


def test_an_override_that_chooses_a_variant_takes_out_what_only_others_have() -> None:
    said: list[str] = []
    values: dict[str, Any] = {"recipe": "sft", "optimizer": {"name": "muon", "muon_momentum": 0.9, "lr": 1e-3}}

    def loaded(*overrides: str) -> TrainingConfig:
        return load_config(TrainingConfig, values, source=Path("run.toml"), overrides=overrides, say=said.append)

    found = loaded("optimizer.name=adamw_bf16", "lr_schedule.name=wsd", "lr_schedule.decay_steps=5")
    assert found.optimizer == AdamWConfig(name="adamw_bf16", lr=1e-3)
    assert found.lr_schedule == WSDScheduleConfig(name="wsd", decay_steps=5)
    where = "optimizer.muon_momentum = 0.9 of run.toml"
    assert said == [f"override optimizer.name=adamw_bf16 takes out {where}, a key of 'muon'"]
    said.clear()
    assert loaded("optimizer.muon_momentum=0.5").optimizer == MuonConfig(name="muon", lr=1e-3, muon_momentum=0.5)
    # What the command line itself asks for is not taken out.
    error = error_of(values, "optimizer.name=adamw", "optimizer.muon_momentum=0.5")
    assert (error.where, said) == ("override optimizer.muon_momentum", [])


def test_further_mistakes_are_counted() -> None:
    assert "(and 2 more)" in error_of({"train": {"a": 1, "b": 1}, "mesh": {"c": 1}}).what


def test_a_missing_required_key() -> None:
    with pytest.raises(UserError, match=r"run\.toml: recipe: is required; add it to the TOML"):
        load_config(TrainingConfig, {}, source=Path("run.toml"))


@pytest.mark.parametrize("value", [3, "x", [{"steps": 3}]])
@pytest.mark.parametrize("section", ["train", "optimizer"])
def test_a_value_where_a_section_belongs(section: str, value: object) -> None:
    error = error_of({section: value})
    assert (error.where, error.todo) == (f"run.toml: {section}", f"write [{section}], and its keys under it")


def test_a_variant_where_its_section_belongs() -> None:
    assert error_of({"optimizer": "muon"}).todo == 'write optimizer.name = "muon"'
    assert error_of({}, "optimizer=muon").todo == "write optimizer.name=muon"
    assert error_of({}, "train=3").todo == "set a key of it: train.KEY=…; `fsdp2kit keys train` lists them"


def test_the_model_config_takes_any_key() -> None:
    config = {"model_type": "llama", "rope_scaling": {"factor": 2.0}, "layer_types": ["a", "b"]}
    assert load({"model": {"config": config}}).model.config == config


# --- overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        (" train.steps = 100 ", ["train", "steps"], 100),
        ("compile.enabled=true", ["compile", "enabled"], True),
        ("wandb.name=two words", ["wandb", "name"], "two words"),
        ('wandb.name="123"', ["wandb", "name"], "123"),
        ("run.dir=runs/a=b", ["run", "dir"], "runs/a=b"),
        ("data.path=../x/*.jsonl", ["data", "path"], "../x/*.jsonl"),
        ('wandb.tags=["a", "b"]', ["wandb", "tags"], ["a", "b"]),
        ("model.config.rope_scaling.factor=2.0", ["model", "config", "rope_scaling", "factor"], 2.0),
        ("train={steps = 3}", ["train"], {"steps": 3}),
        ("wandb.name=", ["wandb", "name"], ""),
    ],
)
def test_override_syntax(override: str, path: list[str], value: object) -> None:
    found_path, found = parse_override(override)
    assert found_path == path
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("override", ["train.steps", "=3", "train..steps=3", "train.=3", "a b.c=3", ""])
def test_bad_override_forms(override: str) -> None:
    with pytest.raises(UserError, match=r"not of the form section\.key=value; write e\.g\."):
        parse_override(override)


def test_an_option_that_is_no_override() -> None:
    assert error_of({}, "--x=3").where == "option '--x=3'"


def test_overrides_win_over_the_file_and_the_last_wins() -> None:
    values = {"model": {"config": {"a": 1}}, "train": {"steps": 1, "log_every": 7}}
    before = copy.deepcopy(values)
    config = load(values, "train.steps=2", "train.steps=3", "model.config.a=2")
    assert (config.train.steps, config.train.log_every, config.model.config) == (3, 7, {"a": 2})
    assert values == before, "the caller's values stay"


UNSET = {
    "optional": ({"train": {"epochs": 2}}, "train.epochs=none", lambda c: c.train.epochs, None),
    "as Python writes it": ({"train": {"epochs": 2}}, "train.epochs=None", lambda c: c.train.epochs, None),
    "as JSON writes it": ({"eval": {"path": "x.jsonl"}}, "eval.path=null", lambda c: c.eval.path, None),
    "to its default": ({"train": {"log_every": 7}}, "train.log_every=none", lambda c: c.train.log_every, 1),
    "a section": ({"eval": {"every": 7}}, "eval=none", lambda c: c.eval.every, 0),
    "an entry": ({"eval": {"sets": {"a": {"path": "x.b"}}}}, "eval.sets.a=none", lambda c: c.eval.sets, {}),
    "of an entry of a list": (
        {"data": {"sources": [{"path": "a.b"}, {"path": "x.b", "split": "y"}]}},
        "data.sources.1.split=none",
        lambda c: c.data.sources[1].split,
        load({}).data.split,
    ),
    "of the model's config": (
        {"model": {"config": {"rope": {"factor": 2}, "a": 1}}},
        "model.config.rope.factor=none",
        lambda c: c.model.config,
        {"rope": {}, "a": 1},
    ),
    "what is not there": ({}, "model.config.rope.factor=none", lambda c: c.model.config, {}),
    'where "none" is a value': (
        {"fsdp": {"offload": "params"}},
        "fsdp.offload=none",
        lambda c: c.fsdp.offload,
        "none",
    ),
    "the word itself": ({}, 'wandb.name="none"', lambda c: c.wandb.name, "none"),
}


@pytest.mark.parametrize("name", UNSET)
def test_none_takes_a_key_out(name: str) -> None:
    values, override, read, expected = UNSET[name]
    assert read(load(values, override)) == expected


def test_an_override_reaches_into_a_list_of_tables() -> None:
    values = {"data": {"sources": [{"path": "a.b"}, {"path": "c.d", "weight": 2.0}]}}
    assert [one.weight for one in load(values, "data.sources.0.weight=3").data.sources] == [3.0, 2.0]
    assert error_of(values, "data.sources.1.weigth=3").where == "override data.sources.1.weigth"
    error = error_of(values, "data.sources.2.weight=3")
    assert error.what == "data.sources has 2 entries, counted from 0"
    for override in ("data.sources.path=x.b", "data.sources.1=x.b"):
        assert error_of(values, override).todo.startswith("set a key of it (data.sources.0.KEY=…)")


@pytest.mark.parametrize("key", ["train.epoch", "trian.epochs", "eval.sets.a.pth", "train.epochs.x"])
def test_an_unknown_key_cannot_be_taken_out(key: str) -> None:
    assert error_of({}, f"{key}=none").where.startswith("override ")


def test_of_two_alternatives_an_override_wins_and_says_so() -> None:
    said: list[str] = []

    def loaded(values: dict[str, Any], *overrides: str) -> TrainingConfig:
        values = {"recipe": "sft", **values}
        return load_config(TrainingConfig, values, source=Path("run.toml"), overrides=overrides, say=said.append)

    config = loaded({"train": {"epochs": 2}, "data": {"sources": [{"path": "x.jsonl"}]}}, "train.steps=5")
    assert (config.train.steps, config.train.epochs, len(config.data.sources)) == (5, None, 1)
    config = loaded({"train": {"steps": 9}}, "train.epochs=1")
    assert (config.train.steps, config.train.epochs) == (None, 1)
    assert said == [
        "override train.steps=5 takes the place of train.epochs = 2 of run.toml",
        "override train.epochs=1 takes the place of train.steps = 9 of run.toml",
    ]
    schedule = loaded({"lr_schedule": {"warmup_ratio": 0.1}}, "lr_schedule.warmup_steps=5").lr_schedule
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (5, 0.0)
    assert loaded({"data": {"sources": [{"path": "x.jsonl"}]}}, "data.path=y.jsonl").data.sources == []
    said.clear()
    both = loaded({"train": {"epochs": 2}}, "train.steps=5", "train.epochs=1").train
    assert (both.steps, both.epochs) == (5, 1), "refused later: both were asked for"
    assert loaded({"train": {"epochs": 2}}, "train.steps=none").train.epochs == 2
    loaded({"lr_schedule": {"warmup_ratio": 0.0}}, "lr_schedule.warmup_steps=5")
    assert not said


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("train.steps=many", "override train.steps"),
        ("train.stepz=3", "override train.stepz"),
        ("foo.bar.baz=3", "override foo"),
        ("train={stepz = 3}", "override train.stepz"),
        ("wandb.tags=[1]", "override wandb.tags.0"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(override: str, where: str) -> None:
    assert error_of({"mesh": {"cp": 1}}, override).where == where


def test_an_override_below_a_value() -> None:
    assert error_of({}, "recipe.x=3").what == "recipe is a value, not a section"
    assert error_of({"train": {"steps": 1}}, "train.steps.x=3").what == "steps is a value, not a section"


# --- input paths ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder with TOMLs and data, and the working directory elsewhere."""
    tomls, cwd = tmp_path / "tomls", tmp_path / "cwd"
    for folder in (tomls, cwd):
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "x.jsonl").touch()
    monkeypatch.chdir(cwd)
    return tomls, cwd


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("data/x.jsonl", "{tomls}/data/x.jsonl"),
        ("./data", "{tomls}/data"),
        ("data", "{tomls}/data"),  # a folder that is there beats a hub id
        ("../tomls/data/x.jsonl", "{tomls}/data/x.jsonl"),
        ("data/*.jsonl", "{tomls}/data/*.jsonl"),
        ("data/missing.jsonl", "{tomls}/data/missing.jsonl"),
        ("missing.parquet", "{tomls}/missing.parquet"),
        ("a/b/c", "{tomls}/a/b/c"),  # too deep for a hub id
        ("/abs/x.jsonl", "/abs/x.jsonl"),
        ("~/x.jsonl", "{home}/x.jsonl"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("gpt2", "gpt2"),
        ("hf://datasets/a/b/x.jsonl", "hf://datasets/a/b/x.jsonl"),
    ],
)
def test_paths_in_a_toml_are_relative_to_it(folders: tuple[Path, Path], written: str, expected: str) -> None:
    tomls, _ = folders
    config = load({"data": {"path": written}}, source=tomls / "run.toml")
    assert config.data.path == expected.format(tomls=tomls, home=Path.home())


def test_paths_in_overrides_are_relative_to_the_working_directory(folders: tuple[Path, Path]) -> None:
    tomls, cwd = folders
    config = load(
        {"data": {"path": "data/x.jsonl"}},
        "data.path=data/x.jsonl",
        "model={path = './model', tokenizer = 'gpt2'}",
        source=tomls / "run.toml",
    )
    assert config.data.path == str(cwd / "data" / "x.jsonl")
    assert config.model.path == str(cwd / "model")
    assert config.model.tokenizer == "gpt2"


def test_every_kind_of_input_path_is_resolved(folders: tuple[Path, Path]) -> None:
    tomls, _ = folders
    for name in ("random", "auto"):
        (tomls / name).mkdir()  # keywords stay keywords, whatever lies beside the TOML
    values = {
        "run": {"resume": "old/step-1", "dir": "runs/y"},
        "model": {"weights": "old/step-2", "chat_template": "chat"},
        "eval": {"path": "data/x.jsonl"},
    }
    config = load(values, source=tomls / "run.toml")
    assert (config.run.resume, config.model.weights) == (f"{tomls}/old/step-1", f"{tomls}/old/step-2")
    assert (config.model.chat_template, config.eval.path) == (f"{tomls}/chat", f"{tomls}/data/x.jsonl")
    assert config.run.dir == "runs/y"  # an output: relative to the working directory
    config = load({"run": {"resume": "auto"}, "model": {"weights": "random"}}, source=tomls / "run.toml")
    assert (config.run.resume, config.model.weights) == ("auto", "random")


def test_the_home_directory_is_found_in_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: tuple[Path, Path]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    home, tomls = f"{tmp_path / 'home'}", folders[0]
    keys = {
        "run": ("dir", "resume"),
        "model": ("path", "weights", "tokenizer", "chat_template"),
        "data": ("path",),
        "eval": ("path",),
        "checkpoint": ("dir", "export_dir"),
    }
    written = {section: {name: f"~/{name}" for name in names} for section, names in keys.items()}
    overrides = [f"{section}.{name}=~/{name}" for section, names in keys.items() for name in names]
    for config in (load(written, source=tomls / "run.toml"), load({}, *overrides, source=tomls / "run.toml")):
        for section, names in keys.items():
            for name in names:
                assert getattr(getattr(config, section), name) == f"{home}/{name}"
    assert TrainingConfig.model_validate({"recipe": "x", **written}).data.path == f"{home}/path"
    assert to_path("~/x") == Path(home, "x")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine.py").touch()
    (tmp_path / "home" / "run.toml").write_text('recipe = "~/mine.py"')
    assert find_toml("~/run.toml") == Path(home, "run.toml")
    assert find_recipe("~/mine.py", toml=tomls / "run.toml") == Path(home, "mine.py")


# --- and back ------------------------------------------------------------------------------------------------------


def test_what_is_dumped_loads_as_the_same_config_from_elsewhere(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tomls, _ = folders
    values = {
        "model": {"path": "gpt2", "config": {"rope": {"factor": 2.0}, "layers": ["a", "b"], "flag": False}},
        "mesh": {"dp_shard": 4},
        "data": {"path": "data/x.jsonl"},
        "optimizer": {"betas": [0.8, 0.9], "lr": 3e-7},
        "wandb": {"tags": ["ü", '"quoted"']},
    }
    config = load(values, "eval.path=data/x.jsonl", "eval.every=3", source=tomls / "run.toml")
    saved = tmp_path / "runs" / "x" / "config.toml"
    saved.parent.mkdir(parents=True)
    saved.write_text(dump_toml(config), encoding="utf-8")
    assert load_config(TrainingConfig, read_toml(saved), source=saved) == config
