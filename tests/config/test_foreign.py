"""What other tools call a key, a value or a path, answered with what it is here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from fsdp2kit.config import load_config
from fsdp2kit.config.checks import check_config
from fsdp2kit.config.foreign import NAMES, NOT_OFFERED, WITHOUT_KEY, advise_on_key, advise_on_path
from fsdp2kit.config.load import known_keys, read_toml
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.config.section import Section
from fsdp2kit.errors import UserError

BASE = {"recipe": "x", "model": {"path": "org/model"}, "train": {"steps": 1}}


def refusal(*overrides: str, **values: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        load_config(TrainingConfig, {**BASE, **values}, source=Path("x.toml"), overrides=overrides)
    return caught.value


# A key as users of other tools write it, and what the answer must name.
KEYS = {
    "optimizer.learning_rate=1e-5": "optimizer.lr",
    "train.learning_rate=1e-5": "optimizer.lr",
    "train.gradient_accumulation_steps=4": "derived: train.global_batch_size",
    "train.num_train_epochs=3": "train.epochs",
    "train.bf16=true": 'fsdp.param_dtype = "bfloat16"',
    "train.fp16=true": "gradient scaler",
    "model.torch_dtype=bfloat16": "fsdp.param_dtype",
    "output_dir=x": "run.dir",
    "trainer.max_steps=3": "train.steps",
    "training_args.learning_rate=1": "optimizer.lr",
    "base_model=x": "model.path",
    "model.load_in_8bit=true": "quantised weights",
    "tokenizer.max_seq_len=128": "data.seq_len",
    "dataset.packed=true": "data.pack",
    "train.compile=true": "compile.enabled",
    "training.seq_len=128": "data.seq_len",
    "training.steps=128": "train.steps",
    "parallelism.context_parallel_degree=2": "mesh.cp",
    "activation_checkpoint.mode=full": "activation_checkpointing.mode",
    "lr_scheduler.warmup_steps=2": "lr_schedule.warmup_steps",
    "checkpoint.interval=2": "checkpoint.every",
    "metrics.log_freq=2": "train.log_every",
    "job.dump_folder=x": "run.dir",
    "model.finetuning_type=lora": "lora.rank",
    "wandb.enabled=false": "wandb.mode",
    "--optimizer.lr=1e-5": "write optimizer.lr=1e-5",
    "--lr": "write overrides as train.steps=100",
    "lora.r=8": "lora.rank",
    "peft_config.target_modules=['q_proj']": "lora.target_modules",
    "mesh.tp=2": "tensor parallelism is not offered",
    "train.nproc_per_node=2": "fsdp2kit run TOML --nproc N",
    "fsdp.fsdp_sharding_strategy=1": "fsdp.strategy",
    "fsdp.cpu_offload=true": "fsdp.offload",
    "train.learningRate=1": "optimizer.lr",
    "scheduler.gamma_of_ours=1": "[lr_schedule]",
}


@pytest.mark.parametrize("override", KEYS)
def test_a_key_of_another_tool_is_answered_with_ours(override: str) -> None:
    error = refusal(override)
    assert KEYS[override] in error.todo
    assert len(str(error)) < 300


def test_every_name_of_the_table_is_answered() -> None:
    known, answered = known_keys(TrainingConfig), set()
    for key, names in (NAMES | WITHOUT_KEY | NOT_OFFERED).items():
        for name in names.split():
            where = name.split(".") if "." in name else ["train", name]
            advice = advise_on_path(where, known) or advise_on_key(where, None, known)
            assert advice, name
            if f" is {key} here" in advice:
                answered.add(key)
    assert answered == NAMES.keys() & known, "each key is the answer to one of its names"


VALUES = {
    "fsdp.param_dtype=bf16": 'write "bfloat16"',
    "fsdp.param_dtype=torch.bfloat16": 'write "bfloat16"',
    "fsdp.reduce_dtype=fp32": 'write "float32"',
    "fsdp.strategy=FULL_SHARD": 'write "full_shard"',
    "fsdp.strategy=zero2": 'write "shard_grad_op"',
    "optimizer.name=adamw_torch_fused": 'write "adamw"',
    "optimizer.name=adamw_bnb_8bit": 'write "adamw_8bit"',
    "lr_schedule.name=Cosine": 'write "cosine"',
    "data.pack=True": "write true",
    "data.pack=False": "write false",
    "data.pack=yes": "write true",
    "data.pack=0": "write false",
    "compile.enabled='true'": "write true",
    "train.steps=1e3": "write 1000",
    "train.steps=1000.0": "write 1000",
    "train.steps='1,000'": "write 1000",
    "optimizer.lr='0,001'": "write 0.001",
    "optimizer.lr='2,5e-5'": "write 2.5e-05",
    "optimizer.lr='1e-5'": "write 1e-05",
    "eval.prompts=hi": """write 'eval.prompts=["hi"]'""",
    "wandb.tags='say \"hi\", twice'": r"""write 'wandb.tags=["say \"hi\"", "twice"]'""",
    "optimizer.betas=0.9,0.95": "write 'optimizer.betas=[0.9, 0.95]'",
    "optimizer.betas=0.9": "write 'optimizer.betas=[0.9, 0.95]'",  # the second is the default's
    "optimizer.betas=[0.9]": "write 'optimizer.betas=[0.9, 0.95]'",
    "optimizer.betas='(.8, .9)'": "write 'optimizer.betas=[0.8, 0.9]'",
    "optimizer.betas='0.8 0.9'": "write 'optimizer.betas=[0.8, 0.9]'",
    "preflight.allow=dropout": """write 'preflight.allow=["dropout"]'""",
}


@pytest.mark.parametrize("override", VALUES)
def test_a_value_in_another_spelling_is_answered_with_ours(override: str) -> None:
    key = override.partition("=")[0]
    assert refusal(override).todo.startswith(f"{VALUES[override]}; {key.rpartition('.')[2]}: ")
    advised = VALUES[override].removeprefix("write ")
    (followed,) = shlex.split(advised if advised.startswith("'") else f"{key}={advised}")
    load_config(TrainingConfig, BASE, source="x.toml", overrides=[followed])


def lists_of(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys whose values are lists, each with a value that is accepted as one of several."""
    for name, field in schema.model_fields.items():
        for kind in get_args(field.annotation) or (field.annotation,):
            if isinstance(kind, type) and not get_args(kind) and issubclass(kind, Section):
                yield from lists_of(kind, f"{prefix}{name}.")
        if get_origin(field.annotation) in (list, tuple) and not prefix.endswith("sources."):
            yield f"{prefix}{name}", field.annotation


def test_a_value_in_place_of_a_list_is_advised_as_an_accepted_one() -> None:
    """Every list of every key, given as one of its items."""
    advised = 0
    for key, kind in dict(lists_of(TrainingConfig)).items():
        (item, *_) = get_args(kind)
        text = next(iter(get_args(item)), "a") if get_origin(item) is Literal else "a"
        error = refusal(f"{key}={0.5 if get_origin(kind) is tuple else text}")
        if not error.todo.startswith("write"):
            assert issubclass(item, Section), key
            continue
        (followed,) = shlex.split(error.todo.partition(";")[0].removeprefix("write "))
        load_config(TrainingConfig, BASE, source="x.toml", overrides=[followed])
        advised += 1
    assert advised > 6


def test_a_number_that_no_list_takes_is_not_advised() -> None:
    assert refusal("optimizer.betas=5").todo.startswith("betas: ")
    assert refusal("preflight.allow=everything").todo.startswith("allow: ")


@pytest.mark.parametrize("override", ["fsdp.strategy=best", "data.pack=maybe", "train.steps=1.5", "train.steps=many"])
def test_what_is_no_spelling_of_anything_gets_the_keys_own_line(override: str) -> None:
    assert not refusal(override).todo.startswith("write")


@pytest.mark.parametrize(
    ("line", "todo"),
    [
        ("pack = True", "write pack = true"),
        ("pack = FALSE # packs", "write pack = false"),
        ("pack = yes", "write pack = true"),
        ("path = None", "leave path out"),
        ("name = adamw", "put quotes around text"),
        ("path = /data/x.jsonl", "put quotes around text"),
        ("seq_len: 128", "write seq_len = 128: this looks like YAML"),
        ("path: mine.jsonl", 'write path = "mine.jsonl": this looks like YAML'),
        ("pack: yes", "write pack = true: this looks like YAML"),
        ("split: null", "leave split out: this looks like YAML"),
        ("seq_len = 128 128", "mend that line"),
        ("???", "mend that line"),
    ],
)
def test_a_line_of_another_language_is_answered_with_toml(line: str, todo: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f'recipe = "sft"\n[data]\n{line}\n')
    with pytest.raises(UserError) as caught:
        read_toml(path)
    assert caught.value.todo.startswith(todo)
    assert "line 3" in caught.value.what


# Paths under a key of another kind


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """One of each kind of thing that a path may name."""
    places = {
        name: tmp_path / name for name in ("model", "checkpoint", "run", "adapter", "rows", "quantised", "empty")
    }
    for place in places.values():
        place.mkdir()
    (places["model"] / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (places["checkpoint"] / ".metadata").write_bytes(b"")
    for name in ("config.toml", "metrics.jsonl"):
        (places["run"] / name).write_text("")
    (places["adapter"] / "adapter_config.json").write_text("{}")
    (places["quantised"] / "model.Q4_K_M.gguf").write_text("")
    for name in ("a.jsonl", "model.safetensors", "full.pt", "model.gguf"):
        (places["rows"] / name).write_text("")
        places[name] = places["rows"] / name
    return places


MISPLACED = [
    ("model.path", "checkpoint", "model.weights"),
    ("model.path", "run", "run/hf"),
    ("model.path", "adapter", "model.adapter"),
    ("model.path", "model.gguf", "GGUF"),
    ("model.path", "quantised", "GGUF"),
    ("model.path", "a.jsonl", "data.path"),
    ("model.adapter", "checkpoint", "fsdp2kit convert"),
    ("model.adapter", "run", "run/hf"),
    ("model.adapter", "model.safetensors", "directory"),
    ("model.weights", "model", "model.path"),
    ("model.weights", "run", "checkpoints"),
    ("model.weights", "full.pt", "fsdp2kit convert"),
    ("model.tokenizer", "checkpoint", "checkpoint/hf"),
    ("run.resume", "model", "model.path"),
    ("run.resume", "run", "run.dir"),
    ("data.path", "model", "model.path"),
    ("data.path", "checkpoint", "model.weights"),
]
IN_PLACE = [
    ("model.path", "model"),
    ("model.path", "empty"),
    ("model.weights", "checkpoint"),
    ("model.adapter", "adapter"),
    ("run.resume", "checkpoint"),
    ("data.path", "rows"),
    ("data.path", "a.jsonl"),
]


def config_with(key: str, path: Path) -> TrainingConfig:
    return load_config(TrainingConfig, BASE, source=path.parent / "x.toml", overrides=[f"{key}='{path}'"])


@pytest.mark.parametrize(("key", "kind", "names"), MISPLACED)
def test_a_path_under_another_key_is_answered_with_its_own(
    key: str, kind: str, names: str, places: dict[str, Path]
) -> None:
    with pytest.raises(UserError) as caught:
        check_config(config_with(key, places[kind]), world_size=1, local_world_size=1)
    assert caught.value.where == key
    assert str(places[kind]) in caught.value.what
    assert names in caught.value.todo


@pytest.mark.parametrize(("key", "kind"), IN_PLACE)
def test_a_path_under_its_own_key_is_not_refused(key: str, kind: str, places: dict[str, Path]) -> None:
    check_config(config_with(key, places[kind]), world_size=1, local_world_size=1)
