"""A chat template on a base model: its tokens, their rows on any mesh, and an export that ends its turns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp2kit.checkpoint import reader
from fsdp2kit.checkpoint.from_hf import hf_to_dcp
from fsdp2kit.checkpoint.state import fill_weights
from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import LoraConfig, ModelConfig
from fsdp2kit.config.section import TEMPLATES
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model, materialize
from fsdp2kit.model.tokenizer import build_tokenizer, check_same_tokens, new_tokens, turn_ends
from fsdp2kit.parity.engine import whole
from fsdp2kit.planner.check import check_offline
from fsdp2kit.run import load
from fsdp2kit.weights import shards
from fsdp2kit.weights.record import source_of
from tests.data.helpers.templates import encode_chat, make_tokenizer, spoken
from tests.model.helpers import save_base, sharded
from tests.support.models import DEMO, full
from tests.support.runs import run_recipe
from tests.support.workers import WorkerPool
from tools import dcp_to_hf

KINDS = ("smollm2", "llama3", "phi")  # a tied head, one of its own, one with a bias
QUESTION = [{"role": "user", "content": "Is water wet?"}]
CHAT = [*QUESTION, {"role": "assistant", "content": "Yes, wet."}]


def expected_of(path: Path, *, new: Sequence[int]) -> dict[str, np.ndarray]:
    """The stored weights with new rows by plain torch: the mean of all rows but the new ones."""
    found = {}
    for name, stored in load_file(path / "model.safetensors").items():
        value = stored.float()
        if name.startswith(("model.embed_tokens", "lm_head")):
            size = max(len(value), max(new) + 1)
            kept = [at for at in range(len(value)) if at not in new]
            grown = torch.empty(size, *value.shape[1:])
            grown[: len(value)] = value
            grown[list(new)] = value[kept].double().mean(0).float()
            value = grown
        found[name] = value.numpy()
    return found


def loaded_on_a_mesh(folder: Path, kinds: Sequence[str], shard: int) -> dict[str, dict[str, np.ndarray]]:
    """Parameters read from Hugging Face directories and from checkpoints made of them, in blocks of a few rows."""
    found = {}
    for kind in kinds:
        path = folder / kind
        for source in ("pretrained", str(folder / f"{kind}-dcp")):
            section = ModelConfig(path=str(path), weights=source, chat_template="chatml")
            model = sharded(section, shard)
            with mock.patch.object(shards, "_BLOCK", 500), mock.patch.object(reader, "BLOCK_BYTES", 1000):
                fill_weights(section, model, seed=0)
            tensors = {name: whole(one.detach()).clone().numpy() for name, one in model.named_parameters()}
            found[f"{kind} {Path(source).name}"] = tensors
    return found


@pytest.mark.parametrize(("size", "shard"), [(1, 1), full(3, 3), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_new_rows_are_the_mean_of_the_others(size: int, shard: int, pool: WorkerPool, tmp_path: Path) -> None:
    for kind in KINDS:
        hf_to_dcp(save_base(tmp_path, kind, dtype=torch.bfloat16), tmp_path / f"{kind}-dcp")
    new = new_tokens(build_tokenizer(ModelConfig(path=str(tmp_path / "phi"), chat_template="chatml")))
    assert len(new) == 2
    for found in pool.run(size, loaded_on_a_mesh, tmp_path, KINDS, shard):
        assert len(found) == 6
        for name, tensors in found.items():
            expected = expected_of(tmp_path / name.split()[0], new=new)
            assert tensors.keys() <= expected.keys()
            for key, tensor in tensors.items():
                np.testing.assert_allclose(tensor, expected[key], rtol=1e-6, atol=1e-8, err_msg=f"{name} {key}")


@pytest.mark.parametrize("padding", [1, 64])
def test_a_padded_vocabulary_has_rows_already(padding: int, tmp_path: Path) -> None:
    path = save_base(tmp_path, "llama3", padding=padding)
    section = ModelConfig(path=str(path), chat_template="chatml")
    new = new_tokens(build_tokenizer(section))
    stored = json.loads((path / "config.json").read_text())["vocab_size"]
    assert build_model(section).config.vocab_size == max(stored, new[-1] + 1)
    found = loaded_in_one(section)
    for key, expected in expected_of(path, new=new).items():
        np.testing.assert_allclose(found[key], expected, rtol=1e-6, atol=1e-8)


def loaded_in_one(section: ModelConfig) -> dict[str, np.ndarray]:
    model = build_model(section)
    materialize(model, device=torch.device("cpu"))
    fill_weights(section, model, seed=0)
    return {name: one.detach().numpy() for name, one in model.named_parameters()}


def test_nothing_is_added_where_nothing_is_needed(tmp_path: Path) -> None:
    path = save_base(tmp_path, "smollm2")
    zephyr = build_tokenizer(ModelConfig(path=str(path), chat_template="zephyr"))
    assert (new_tokens(zephyr), turn_ends(zephyr)) == ((), {zephyr.eos_token_id})
    chatml = build_tokenizer(ModelConfig(path=str(path), chat_template="chatml"))
    chatml.save_pretrained(tmp_path / "again")
    again = build_tokenizer(ModelConfig(path=str(tmp_path / "again"), chat_template="chatml"))
    assert new_tokens(again) == ()
    assert turn_ends(again) == turn_ends(chatml) == {chatml.convert_tokens_to_ids("<|im_end|>")}
    assert turn_ends(AutoTokenizer.from_pretrained(path)) == set()  # there is no template


@pytest.mark.parametrize(
    ("frozen", "lora", "says"),
    [
        (["model.embed_tokens.*"], {}, r"model.freeze: freezes the embedding, to which .* adds 2 tokens"),
        (
            [],
            {"rank": 2},
            r'model.chat_template: adds 2 .* frozen .*modules_to_save = \["embed_tokens", "lm_head"\].*have them',
        ),
        ([], {"rank": 2, "modules_to_save": ["lm_head"]}, r"model.chat_template: adds 2 tokens"),
    ],
)
def test_a_frozen_embedding_cannot_learn_new_tokens(
    frozen: list[str], lora: dict[str, Any], says: str, tmp_path: Path
) -> None:
    section = ModelConfig(path=str(save_base(tmp_path, "llama3")), chat_template="chatml", freeze=frozen)
    with pytest.raises(UserError, match=says):
        build_model(section, lora=LoraConfig(**lora))


def test_the_advice_about_no_template_names_every_ready_one(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_base(tmp_path, "smollm2"))
    others = r"\(gemma, llama3, mistral, zephyr\)"
    with pytest.raises(UserError, match=rf'set model\.chat_template = "chatml", to another ready one {others}'):
        encode_chat(CHAT, tokenizer)


# Another tokenizer than the model's own


def edited(base: Path, out: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    state = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    edit(state)
    (out / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    if "<|endoftext|>" not in state["model"]["vocab"]:
        config = (out / "tokenizer_config.json").read_text(encoding="utf-8")
        (out / "tokenizer_config.json").write_text(config.replace("<|endoftext|>", "<|tool|>"), encoding="utf-8")
    return out


def swap(state: dict[str, Any]) -> None:
    words = state["model"]["vocab"]
    first, second = words["a"], words["b"]
    words["a"] = second
    words["b"] = first


def rename(state: dict[str, Any]) -> None:
    words = state["model"]["vocab"]
    words["<|tool|>"] = words.pop("<|endoftext|>")
    state["added_tokens"][0]["content"] = "<|tool|>"


OTHERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "swapped": (swap, r"'a' has id \d+ there, and \d+ here \(2 of 260 tokens differ\)"),
    "merges": (lambda state: state["model"]["merges"].clear(), r"becomes \[.*\] there, and \[.*\] here"),
    "normalizer": (lambda state: state.update(normalizer={"type": "Lowercase"}), r"'The.* becomes "),
    "spaces": (lambda state: state["pre_tokenizer"].update(add_prefix_space=True), r"'The.* becomes "),
    "renamed": (rename, ""),
    "same": (lambda state: None, ""),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_tokenizer_with_other_ids_than_the_models_own(name: str, tmp_path: Path) -> None:
    edit, says = OTHERS[name]
    base = save_base(tmp_path, "smollm2")
    section = ModelConfig(path=str(base), tokenizer=str(edited(base, tmp_path / "other", edit)))
    if says:
        expected = rf"model\.tokenizer: .*{says}.*preflight\.allow = .*other_tokenizer"
        with pytest.raises(UserError, match=expected):
            check_same_tokens(section)
    else:
        check_same_tokens(section)


def test_another_models_tokenizer_is_refused_by_the_check_and_the_start(pool: WorkerPool, tmp_path: Path) -> None:
    base = save_base(tmp_path, "smollm2")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    toml, demo = str(write_toml(tmp_path, base)), f"model.tokenizer={DEMO / 'tokenizer'}"
    options = [demo, "train.steps=1", "train.global_batch_size=1"]
    says = r"gives tokens other ids than the tokenizer of model\.path"
    config = load(toml, options)[1]
    with pytest.raises(UserError, match=says):
        check_offline(config, MeshSizes(1, 1, 1))
    [said] = pool.run(1, run_recipe, toml, options)
    assert re.match(rf"error: model\.tokenizer: .*{says}", said)
    allowed = load(toml, [*options, 'preflight.allow=["other_tokenizer"]', "model.config.vocab_size=1024"])[1]
    check_offline(allowed, MeshSizes(1, 1, 1))


def test_what_is_no_other_tokenizer(tmp_path: Path) -> None:
    base = save_base(tmp_path, "smollm2")
    added = with_added(base, tmp_path / "added", *TOOLS)
    ended = AutoTokenizer.from_pretrained(base)
    ended.eos_token = "<|im_end|>"
    ended.save_pretrained(tmp_path / "ended")
    for folder in (base, added, tmp_path / "ended"):
        check_same_tokens(ModelConfig(path=str(base), tokenizer=str(folder)))
    demo = str(DEMO / "tokenizer")
    check_same_tokens(ModelConfig(config={"model_type": "llama"}, weights="random", tokenizer=demo))
    check_same_tokens(ModelConfig(path="no-one/not-in-the-cache", tokenizer=demo))
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "without")
    check_same_tokens(ModelConfig(path=str(tmp_path / "without"), tokenizer=demo))


def with_added(base: Path, out: Path, *tokens: str, template: str | None = "chatml") -> Path:
    """A copy of a base model's tokenizer to which a user added tokens."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    if template:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(out)
    return out


TOOLS = ("<|im_start|>", "<|im_end|>", "<tool_a>")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["beside", "inside"])
def test_tokens_that_a_user_added_get_rows(kind: str, where: str, tmp_path: Path) -> None:
    base = save_base(tmp_path, kind)
    folder = with_added(base, base if where == "inside" else tmp_path / "tokens", *TOOLS)
    section = ModelConfig(path=str(base), tokenizer=str(folder) if where == "beside" else None)
    stored = json.loads((base / "config.json").read_text())["vocab_size"]
    new = tuple(range(stored, stored + 3))
    model = build_model(section)
    assert (source_of(model).new_tokens, model.config.vocab_size) == (new, stored + 3)
    found = loaded_in_one(section)
    for key, expected in expected_of(base, new=new).items():
        np.testing.assert_allclose(found[key], expected, rtol=1e-6, atol=1e-8, err_msg=key)
    # A vocabulary that is rounded up: the rows without a token are the mean, too.
    rounded = loaded_in_one(section.model_copy(update={"config": {"vocab_size": stored + 60}}))
    for key, expected in expected_of(base, new=range(stored, stored + 60)).items():
        np.testing.assert_allclose(rounded[key], expected, rtol=1e-6, atol=1e-8, err_msg=key)


def test_added_tokens_that_have_rows_keep_them(tmp_path: Path) -> None:
    base = save_base(tmp_path, "llama3", padding=64)
    section = ModelConfig(path=str(base), tokenizer=str(with_added(base, tmp_path / "tokens", *TOOLS)))
    stored = load_file(base / "model.safetensors")
    assert source_of(build_model(section)).new_tokens == ()
    found = loaded_in_one(section)
    assert all(
        np.array_equal(found[name], stored[name].numpy()) for name in ("model.embed_tokens.weight", "lm_head.weight")
    )


def test_a_larger_vocabulary_of_another_model_gets_no_rows(tmp_path: Path) -> None:
    base = save_base(tmp_path, "llama3")
    make_tokenizer(None).save_pretrained(tmp_path / "other")
    other = AutoTokenizer.from_pretrained(tmp_path / "other")
    assert other.vocab_size > 260
    other.add_tokens(["<tool_a>"])
    other.save_pretrained(tmp_path / "other")
    section = ModelConfig(path=str(base), tokenizer=str(tmp_path / "other"))
    assert build_model(section).config.vocab_size == json.loads((base / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize(("kind", "size"), [("smollm2", 2), full("llama3", 2)])
def test_a_run_with_added_tokens_is_resumed_and_exported(
    kind: str, size: int, pool: WorkerPool, tmp_path: Path
) -> None:
    base = save_base(tmp_path, kind)
    folder = with_added(base, tmp_path / "tokens", *TOOLS)
    rows = [{"messages": [*QUESTION, {"role": "assistant", "content": "<tool_a> Yes, wet."}]}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    toml = write_toml(tmp_path, base)
    options = [f"model.tokenizer={folder}", "model.chat_template=none", "fsdp.param_dtype=float32"]
    options += ["train.global_batch_size=2", "optimizer.lr=1e-2", "lr_schedule.name=constant"]
    stored = json.loads((base / "config.json").read_text())["vocab_size"]
    said = pool.run(size, run_recipe, str(toml), [*options, "train.steps=2", "train.micro_batch_size=1"])[0]
    named = ", ".join(f"{text} ({stored + at})" for at, text in enumerate(TOOLS))
    assert f"tokenizer: new tokens {named}; their rows begin as the mean of the others\n" in said
    pool.run(1, run_recipe, str(toml), [*options, "train.steps=4"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == stored + 3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "hf")
    assert tokenizer.convert_tokens_to_ids("<tool_a>") == stored + 2

    # The same four steps by plain transformers, which gets the same rows.
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.resize_token_embeddings(stored + 3, mean_resizing=False)
    weights = {name: torch.tensor(value) for name, value in expected_of(base, new=range(stored, stored + 3)).items()}
    plain.load_state_dict(weights, strict=False)
    text = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    labels = ids.clone()
    labels[0, : labels[0].tolist().index(stored + 2)] = -100
    labels[0, labels[0].tolist().index(stored + 1, labels.shape[1] - 3) + 1 :] = -100
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(4):
        plain(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    ("kind", "whole"), [("smollm2", []), ("llama3", ["embed_tokens", "lm_head"]), full("llama3", [])]
)
def test_added_tokens_beside_an_adapter(kind: str, whole: list[str], pool: WorkerPool, tmp_path: Path) -> None:
    """peft gives the base the same rows; so do a merged export and the run itself."""
    base = save_base(tmp_path, kind)
    folder = with_added(base, tmp_path / "tokens", *TOOLS)
    rows = [{"messages": [*QUESTION, {"role": "assistant", "content": "<tool_a> Yes, wet."}]}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = [f"model.tokenizer={folder}", "model.chat_template=none", "fsdp.param_dtype=float32", "lora.rank=4"]
    options += ["train.global_batch_size=1", "optimizer.lr=1e-2", "train.steps=2"]
    options += [f"lora.modules_to_save={json.dumps(whole)}"] if whole else []
    said = pool.run(1, run_recipe, str(write_toml(tmp_path, base)), options)[0]
    assert ("mean of the others, and stay so: the embedding is frozen\n" in said) == (not whole)
    run = tmp_path / "run"
    assert dcp_to_hf.main([str(run / "checkpoints" / "step-000002"), str(tmp_path / "merged"), "--merge"]) == 0

    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    text = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    rows_of_base = expected_of(base, new=range(len(tokenizer) - 3, len(tokenizer)))
    assert merged.config.vocab_size == len(tokenizer) == len(merged.get_input_embeddings().weight)
    name = "model.embed_tokens.weight"
    stored = load_file(tmp_path / "merged" / "model.safetensors")[name].numpy()
    assert np.allclose(stored, rows_of_base[name], rtol=1e-6, atol=1e-8) == (not whole)
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    plain.load_state_dict({name: torch.tensor(value) for name, value in rows_of_base.items()}, strict=False)
    beside = PeftModel.from_pretrained(plain, run / "hf")
    loaded = AutoPeftModelForCausalLM.from_pretrained(run / "hf")  # draws the rows around the mean, very close to it
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, beside(ids).logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged(ids).logits, loaded(ids).logits, rtol=1e-2, atol=1e-2)


def write_toml(folder: Path, base: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(
        f"""
        recipe = "sft"
        model = {{ path = "{base}", chat_template = "chatml" }}
        data = {{ path = "{folder / "rows.jsonl"}", seq_len = 64 }}
        run.dir = "{folder / "run"}"
        wandb.mode = "disabled"
        """
    )
    return path


@pytest.mark.full
def test_a_base_model_learns_to_end_its_turns(pool: WorkerPool, tmp_path: Path) -> None:
    """Trained, resumed on another mesh, exported; then plain transformers generates, and stops by itself."""
    base = save_base(tmp_path, "smollm2", dtype=torch.bfloat16)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    toml = write_toml(tmp_path, base)
    options = ["fsdp.param_dtype=float32", "train.steps=40", "train.global_batch_size=2", "optimizer.lr=1e-2"]
    options += ["checkpoint.every=20", "checkpoint.export_dtype=float32"]
    first = [*options, "mesh.cp=2", "train.micro_batch_size=2", "train.steps=20"]
    said = pool.run(2, run_recipe, str(toml), first)[0]
    tokenizer = build_tokenizer(ModelConfig(path=str(base), chat_template="chatml"))
    start, end = new_tokens(tokenizer)
    assert f"new tokens <|im_start|> ({start}), <|im_end|> ({end}); their rows begin as the mean of the others" in said
    assert f"generation_config.json also stops at <|im_end|> ({end}), which ends what is trained" in said
    pool.run(1, run_recipe, str(toml), options)

    export = tmp_path / "run" / "hf"
    model = AutoModelForCausalLM.from_pretrained(export)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == end + 1
    assert model.generation_config.eos_token_id == [0, end]
    exported = AutoTokenizer.from_pretrained(export)
    inputs = exported.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert exported.decode(answer) == "Yes, wet.<|im_end|>"
    # The export knows its tokens: nothing is averaged again.
    section = ModelConfig(path=str(export), chat_template="chatml")
    stored = load_file(export / "model.safetensors")["model.embed_tokens.weight"]
    assert np.array_equal(loaded_in_one(section)["model.embed_tokens.weight"], stored.numpy())


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"instruction": "Is water wet?", "output": "Yes."}])
def test_an_export_stops_where_the_turns_of_a_stream_end(
    row: dict[str, Any], pool: WorkerPool, tmp_path: Path
) -> None:
    base = save_base(tmp_path, "smollm2")
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    name = "chat" if "messages" in row else "alpaca"
    options = [f"data.format={name}", "data.streaming=true", "train.steps=1", "train.global_batch_size=1"]
    pool.run(1, run_recipe, str(write_toml(tmp_path, base)), options)
    _, end = new_tokens(build_tokenizer(ModelConfig(path=str(base), chat_template="chatml")))
    stored = json.loads((tmp_path / "run" / "hf" / "generation_config.json").read_text(encoding="utf-8"))
    assert stored["eos_token_id"] == [0, end]


# Ready templates

TOOL = {"type": "function", "function": {"name": "wet", "parameters": {"type": "object", "properties": {}}}}
READY = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»\n",
    "llama3": "<|begin|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "«A<|eot_id|>»",
    "gemma": "<|begin|><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\n«A<end_of_turn>»\n",
    "mistral": "<|begin|>[INST] S\n\nQ [/INST]« A</s>»",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nQ</s>\n<|assistant|>\n«A</s>»\n",
}


def test_every_ready_template_is_named_in_the_schema_and_where_one_is_misspelt() -> None:
    doc = str(ModelConfig.model_fields["chat_template"].description)
    assert {file.stem for file in TEMPLATES.glob("*.jinja")} == READY.keys()
    assert all(f'"{name}"' in doc for name in READY)
    with pytest.raises(UserError, match=r"model.chat_template: chatlm: cannot be read .* \(chatml, gemma, llama3, "):
        build_tokenizer(ModelConfig(path=str(DEMO / "tokenizer"), chat_template="chatlm"))


@pytest.mark.parametrize("name", READY)
def test_a_ready_template(name: str, tmp_path: Path) -> None:
    make_tokenizer(None, eos="</s>").save_pretrained(tmp_path)
    tokenizer = build_tokenizer(ModelConfig(tokenizer=str(tmp_path), chat_template=name))
    talk = [{"role": role, "content": text} for role, text in (("system", "S"), ("user", "Q"), ("assistant", "A"))]
    assert spoken(tokenizer, *encode_chat(talk, tokenizer)) == READY[name]
    prompt = tokenizer.apply_chat_template(talk[:2], tokenize=False, add_generation_prompt=True)
    assert READY[name].startswith(prompt + "«"), "what is learnt begins where generation does"
    twice = encode_chat([*talk, *talk[1:]], tokenizer)
    assert spoken(tokenizer, *twice).count("«") == 2


@pytest.mark.parametrize(
    ("name", "learnt"),
    [
        (
            "chatml",
            '«<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "wet", "arguments": {"of": "water"}}\n</tool_call>',
        ),
        ("llama3", '«{"name": "wet", "parameters": {"of": "water"}}'),
    ],
)
def test_calls_in_a_ready_template(name: str, learnt: str, tmp_path: Path) -> None:
    make_tokenizer(None, eos="</s>").save_pretrained(tmp_path)
    tokenizer = build_tokenizer(ModelConfig(tokenizer=str(tmp_path), chat_template=name))
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "wet", "arguments": '{"of": "water"}'}}]}
    if name == "chatml":
        call["thinking"] = "Hm."
    talk = [*QUESTION, call, {"role": "tool", "content": "very"}, CHAT[1]]
    text = spoken(tokenizer, *encode_chat(talk, tokenizer, tools=[TOOL]))
    assert learnt in text
    assert json.dumps(TOOL, indent=4 if name == "llama3" else None) in text
    assert text.count("«") == 2


def test_a_name_is_not_mistaken_for_a_file(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('recipe = "sft"\nmodel = { path = "x/y", chat_template = "chatml" }\ntrain.steps = 1\n')
    assert load(str(toml), [])[1].model.chat_template == "chatml"
    (tmp_path / "mine").write_text("{{ messages }}")
    toml.write_text(toml.read_text().replace("chatml", "mine"))
    assert load(str(toml), [])[1].model.chat_template == str(tmp_path / "mine")
    (tmp_path / "chatml").write_text("{{ messages }}")
    toml.write_text(toml.read_text().replace('"mine"', '"chatml"'))
    with pytest.raises(UserError, match=r"both a ready template and a file; write './chatml' for the file"):
        load(str(toml), [])
    toml.write_text(toml.read_text().replace('"chatml"', '"./chatml"'))
    assert load(str(toml), [])[1].model.chat_template == str(tmp_path / "chatml")
