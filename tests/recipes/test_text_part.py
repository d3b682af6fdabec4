"""Training the text part of checkpoints of several parts, from the real recipe to a directory of the same class."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3ForConditionalGeneration

from fsdp2kit.checkpoint.from_hf import hf_to_dcp
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.merge import plan_merge
from fsdp2kit.checkpoint.source import open_source
from fsdp2kit.config.schema import LoraConfig, ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.migrate.state_dicts import torch_to_dcp
from fsdp2kit.model.assets import save_assets
from fsdp2kit.model.build import build_model, materialize
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.model.inspect import inspect_model
from fsdp2kit.model.text_part import text_config_of
from fsdp2kit.parity.reference import cross_entropy_sum, gradient_distances
from fsdp2kit.weights.adapters import CONFIG_NAME, WEIGHTS_NAME, adapter_file_name, is_of_adapter
from fsdp2kit.weights.conversion import match_files, to_file_names
from fsdp2kit.weights.entries import grouped_entries
from fsdp2kit.weights.load import load_pretrained
from fsdp2kit.weights.record import find_ties, weights_of
from fsdp2kit.weights.transfer import MappingReader, transfer
from tests.rl.helpers.runs import write_toml as write_rollouts
from tests.support.cases import Case, run_cases
from tests.support.models import VOCABULARY, beyond, full, plain_batches, slow
from tests.support.parts import load_class, look, read_all, stored, write_whole
from tests.support.runs import assert_refused, run_recipe
from tests.support.workers import WorkerPool
from tools import dcp_to_hf as convert

DEMO = Path(__file__).parents[2] / "toml" / "demo"


def write_toml(kind: str, folder: Path, **dtype: Any) -> Path:
    path = write_whole(kind, folder, **dtype)
    toml = folder / f"{kind}.toml"
    toml.write_text(f"""
        recipe = "sft"
        run.dir = "{folder}/run"
        model.path = "{path}"
        fsdp.param_dtype = "float32"
        data = {{ path = "{DEMO / "chat.jsonl"}", seq_len = 64 }}
        train = {{ steps = 2, global_batch_size = 4 }}
        optimizer.lr = 1e-2
        checkpoint = {{ every = 2 }}
        wandb.mode = "disabled"
    """)
    return toml


def is_text(name: str) -> bool:
    return "language_model" in name or name.startswith("lm_head")


RUNS = [
    ("gemma3", 2),
    full("gemma4", 1),
    slow("qwen3_vl", 2),
    slow("mistral3", 1),
    full("qwen3_5", 2),
    full("qwen3_vl_moe", 1),
]
ADAPTERS = [("gemma3", 1), slow("gemma4", 2), full("qwen3_vl", 1), full("mistral3", 2), slow("qwen3_vl_moe", 2)]


@pytest.mark.parametrize(("kind", "cp"), RUNS)
def test_an_export_is_of_the_same_class_and_its_other_parts_are_untouched(
    kind: str, cp: int, pool: WorkerPool, tmp_path: Path
) -> None:
    toml = write_toml(kind, tmp_path, dtype=torch.bfloat16)
    source, out = tmp_path / kind, tmp_path / "run" / "hf"
    options = [f"mesh.cp={cp}"]
    said = pool.run(2, run_recipe, str(toml), [*options, "optimizer.lr=0.0"])[0]
    assert "the text part of" in said, said
    before, after = stored(source), stored(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], one) and after[name].dtype == one.dtype for name, one in before.items())
    for name in ("config.json", "preprocessor_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    assert torch.equal(look(kind, load_class(kind, out)), look(kind, load_class(kind, source)))

    said = pool.run(2, run_recipe, str(toml), [*options, f"run.dir='{tmp_path}/tuned'"])[0]
    assert not said.startswith("error"), said
    after = stored(tmp_path / "tuned" / "hf")
    assert before.keys() == after.keys()
    changed = {name for name, one in before.items() if not torch.equal(after[name], one)}
    assert changed
    assert all(map(is_text, changed))
    assert len(changed) > sum(map(is_text, before)) / 2  # some stay the same in bfloat16
    assert not torch.equal(look(kind, load_class(kind, tmp_path / "tuned" / "hf")), look(kind, load_class(kind, out)))
    shutil.rmtree(tmp_path / "run")
    assert (
        convert.main([str(tmp_path / "tuned" / "checkpoints" / "step-000002"), str(tmp_path / "run"), "--verify"]) == 0
    )
    assert all(torch.equal(one, after[name]) for name, one in stored(tmp_path / "run").items())


@pytest.mark.full
@pytest.mark.parametrize(("kind", "cp"), [("gemma3", 1), ("qwen3_5", 2)])
def test_a_text_part_learns_from_rewards(kind: str, cp: int, pool: WorkerPool, tmp_path: Path) -> None:
    """The embedded engine generates with the text part's weights, and the export is the whole."""
    source = write_whole(kind, tmp_path)
    options = [f"model.path='{source}'", f"run.dir='{tmp_path}/run'", "train.steps=2", f"mesh.cp={cp}"]
    toml = write_rollouts(tmp_path / "prompts")
    said = pool.run(2, run_recipe, str(toml), [*options, "checkpoint.export_hf=final"])[0]
    assert not said.startswith("error"), said
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < max(record["log_prob_gap_max"] for record in records) <= 1e-4
    before, after = stored(source), stored(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    changed = {name for name, one in before.items() if not torch.equal(after[name], one)}
    assert changed
    assert all(map(is_text, changed))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize(("kind", "cp"), ADAPTERS)
def test_peft_reads_an_adapter_on_the_whole(kind: str, cp: int, pool: WorkerPool, tmp_path: Path) -> None:
    toml = write_toml(kind, tmp_path)
    options = [f"mesh.cp={cp}", "lora={rank=4}"]
    said = pool.run(2, run_recipe, str(toml), options)[0]
    assert not said.startswith("error"), said
    adapter, merged = tmp_path / "run" / "hf", tmp_path / "merged"
    assert not (adapter / "config.json").exists()
    base = load_class(kind, tmp_path / kind)
    before = look(kind, base)
    tuned: Any = PeftModel.from_pretrained(base, str(adapter)).eval()
    names = {name for name, module in tuned.named_modules() if "lora_A" in module._modules}
    assert names
    assert all("language_model" in name for name in names)
    assert (look(kind, tuned) - before).abs().max() > 1e-3
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    assert convert.main([str(checkpoint), str(merged), "--merge", "--dtype", "float32"]) == 0
    torch.testing.assert_close(look(kind, load_class(kind, merged)), look(kind, tuned), rtol=1e-4, atol=1e-4)
    first, last = stored(tmp_path / kind), stored(merged)
    assert first.keys() == last.keys()
    assert all(torch.equal(one, last[name]) for name, one in first.items() if not is_text(name))
    # It is trained further.
    more = [f"mesh.cp={cp}", f"model.adapter='{adapter}'", f"run.dir='{tmp_path}/more'", "optimizer.lr=0.0"]
    said = pool.run(2, run_recipe, str(toml), more)[0]
    assert not said.startswith("error"), said
    again = stored(tmp_path / "more" / "hf")
    assert all(torch.equal(one, again[name]) for name, one in stored(adapter).items())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("saved", [["norm", "lm_head"], ["model.norm", "lm_head"]])
def test_modules_that_are_trained_whole_keep_their_names(saved: list[str], tmp_path: Path) -> None:
    """Also those of an adapter that is trained further, whose config names them as the whole does."""
    path = write_whole("mistral3", tmp_path)
    lora = LoraConfig(rank=4, target_modules=["q_proj"], modules_to_save=saved)
    model = build_model(ModelConfig(path=str(path)), lora=lora)
    for name in ("first", "second"):
        adapter, folder = weights_of(model).adapter, tmp_path / name
        assert adapter is not None
        folder.mkdir()
        adapter.save(folder)
        values = {
            adapter_file_name(one, weights_of(model).names): parameter.to("meta")
            for one, parameter in model.named_parameters()
            if is_of_adapter(one)
        }
        save_file({one: torch.ones(tensor.shape) for one, tensor in values.items()}, folder / WEIGHTS_NAME)
        named = json.loads((folder / CONFIG_NAME).read_text())["modules_to_save"]
        assert {"lm_head", "model.language_model.norm"} <= set(named)
        tuned: Any = PeftModel.from_pretrained(load_class("mistral3", path), str(folder))
        trained = tuned.state_dict()
        assert all(trained[f"base_model.model.{one}.modules_to_save.default.weight"].all() for one in named)
        assert get_peft_model_state_dict(tuned).keys() == values.keys()
        model = build_model(ModelConfig(path=str(path), adapter=str(folder)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_layers_have_the_ranks_and_scalings_that_peft_gives_them(tmp_path: Path) -> None:
    path, folder = write_whole("gemma3", tmp_path), tmp_path / "adapter"
    ranks, alphas = {r"model\.language_model\.layers\.0\.self_attn\.q_proj": 8}, {"layers.1.self_attn.k_proj": 32}
    config = peft.LoraConfig(
        r=4, target_modules=r".*language_model.*(q|k)_proj", rank_pattern=ranks, alpha_pattern=alphas
    )
    config.save_pretrained(str(folder))
    for name in ("adapter", "again"):
        theirs: Any = get_peft_model(load_class("gemma3", path), peft.LoraConfig.from_pretrained(str(tmp_path / name)))
        model = build_model(ModelConfig(path=str(path), adapter=str(tmp_path / name)))
        adapter, whole = weights_of(model).adapter, weights_of(model).names.whole
        assert adapter is not None
        assert whole is not None
        found = {}
        for layer in adapter.layers:
            ours, other = (model.get_submodule(layer), theirs.get_submodule(f"base_model.model.{whole.outer(layer)}"))
            assert ours.scaling == other.scaling
            assert ours.r == other.r
            found[layer] = (ours.r["default"], ours.scaling["default"])
        assert len(set(found.values())) == 3
        (tmp_path / "again").mkdir(exist_ok=True)
        adapter.save(tmp_path / "again")


def test_a_merge_is_in_the_dtype_that_the_config_names_anywhere(tmp_path: Path) -> None:
    """Or else in that of the weights."""
    path = write_whole("gemma3", tmp_path, dtype=torch.bfloat16)
    adapter = weights_of(build_model(ModelConfig(path=str(path)), lora=LoraConfig(rank=4))).adapter
    fields = json.loads((path / "config.json").read_text())
    assert adapter is not None
    adapter.save(path)
    del fields["dtype"], fields["text_config"]["dtype"]
    text = fields["text_config"]
    for named in ({"torch_dtype": "float16"}, {"text_config": {**text, "dtype": "float16"}}, {}):
        (path / "config.json").write_text(json.dumps({**fields, **named}))
        with open_source(tmp_path, path) as source:
            plan = plan_merge(source, base=str(path))
        assert plan.dtype.name == ("float16" if named else "bfloat16")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "gemma4", "mistral3", "qwen3_5"])
def test_the_text_part_learns_what_the_whole_would(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    path, batches = write_whole(kind, tmp_path, vocabulary=VOCABULARY + 8), plain_batches(1)
    text = weights_of(build_model(ModelConfig(path=str(path)))).names.whole
    assert text is not None

    def plain(micro_batch_size: int) -> tuple[float, dict[str, np.ndarray]]:
        whole, total = load_class(kind, path, dtype=torch.float32), 0.0
        for rows in batches[0].split(micro_batch_size):
            logits = whole(input_ids=rows.input_ids, use_cache=False).logits
            loss = cross_entropy_sum(logits, rows.labels) / batches[0].targets
            loss.backward()
            total += loss.item()
        gradients = {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}
        assert all(text.inner(name) or not one.any() for name, one in gradients.items())
        return total, {str(inner): one.numpy() for name, one in gradients.items() if (inner := text.inner(name))}

    loss, expected = plain(len(batches[0].input_ids))
    _, control = plain(1)
    noise = gradient_distances(control, expected)
    for dp, cp in ((2, 1), (1, 2)):
        case = Case(kind, dp=dp, cp=cp, pack=False)
        (curves,) = pool.run(2, run_cases, tmp_path, [case], batches)[0]
        assert not beyond(gradient_distances(curves.gradients, expected), noise)
        assert abs(curves.loss[0] / loss - 1) < 1e-5


def test_a_directory_becomes_a_checkpoint_and_comes_back(tmp_path: Path) -> None:
    """A mixture's files store experts transposed."""
    path = write_whole("qwen3_vl_moe", tmp_path)
    before = stored(path)
    hf_to_dcp(path, tmp_path / "dcp")
    assert convert.main([str(tmp_path / "dcp"), str(tmp_path / "out"), "--verify"]) == 0
    after = stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"which has the other parts' weights, is not there; .* with --config"):
        dcp_to_hf(tmp_path / "dcp", tmp_path / "again")
    dcp_to_hf(tmp_path / "dcp", tmp_path / "again", config_dir=tmp_path / "elsewhere")
    assert stored(tmp_path / "again").keys() == before.keys()
    tensors = load_file(tmp_path / "elsewhere" / "model.safetensors")
    other = {name: one + 1 if "visual" in name else one for name, one in tensors.items()}
    save_file(other, tmp_path / "elsewhere" / "model.safetensors")
    with pytest.raises(UserError, match="other weights than those whose text part was trained"):
        dcp_to_hf(tmp_path / "dcp", tmp_path / "other", config_dir=tmp_path / "elsewhere")


@pytest.mark.parametrize("names", ["text", "whole", "former"])
def test_a_state_dict_of_the_whole_loses_nothing(names: str, tmp_path: Path) -> None:
    path = write_whole("gemma3", tmp_path)
    whole, part = load_class("gemma3", path), weights_of(build_model(ModelConfig(path=str(path)))).names.whole
    assert part is not None
    state = {name: one + 1 for name, one in whole.state_dict().items()}
    called = {
        "text": {name: part.inner(name) or name for name in state},
        "whole": {name: name for name in state},
        "former": {name: re.sub(r"^model\.(language_model\.)?", r"\1model.", name) for name in state},
    }[names]
    if names == "former":
        called |= {name: name.removeprefix("model.") for name in state if part.inner(name) is None}
        called["lm_head.weight"] = "language_model.lm_head.weight"
    torch.save({f"module.{called[name]}": one for name, one in state.items()}, tmp_path / "full.pt")
    with pytest.raises(UserError, match=r"which is no part of the text part; .* leave such tensors out"):
        torch_to_dcp(tmp_path / "full.pt", tmp_path / "dcp", config_dir=path)
    text = {f"module.{called[name]}": one for name, one in state.items() if part.inner(name)}
    torch.save(text, tmp_path / "text.pt")
    torch_to_dcp(tmp_path / "text.pt", tmp_path / "dcp", config_dir=path)
    dcp_to_hf(tmp_path / "dcp", tmp_path / "out")
    after = load_class("gemma3", tmp_path / "out").state_dict()
    before = whole.state_dict()
    assert all(torch.equal(one, (state if part.inner(name) else before)[name]) for name, one in after.items())
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no safetensors, and a checkpoint of the text part alone needs"):
        torch_to_dcp(tmp_path / "text.pt", tmp_path / "again", config_dir=path)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl_moe"])
def test_what_a_rollout_engine_is_sent_leads_back(kind: str, tmp_path: Path) -> None:
    """Group by group, by the names of the whole's files, into another text part."""
    path = write_whole(kind, tmp_path)
    model: Any = build_model(ModelConfig(path=str(path)))
    materialize(model, device=torch.device("cpu"))
    load_pretrained(model)
    tensors = {name: one for name, one in model.state_dict().items() if name not in find_ties(model)}
    back: dict[str, torch.Tensor] = {}
    for group in grouped_entries(model, {name: one.to("meta") for name, one in tensors.items()}):
        sent = to_file_names(model, {name: tensors[name] for name in group.sources})
        assert sent.keys() <= stored(path).keys()
        match = match_files(model, {name: one.to("meta") for name, one in sent.items()})
        assert not match.unexpected
        back |= transfer(match.entries, MappingReader(sent), read_all)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], one) for name, one in tensors.items())


def test_older_names_and_what_no_class_reads_stay(tmp_path: Path) -> None:
    """Files of transformers 4.52 to 4.57 and a copy of the tied head; a tensor that transformers does not know."""
    path = write_whole("gemma3", tmp_path)
    tensors = load_file(path / "model.safetensors")
    older = {re.sub(r"^language_model\.model\.", "model.language_model.", name): one for name, one in tensors.items()}
    older |= {"mtp.extra.weight": torch.ones(3, dtype=torch.float16)}
    head = older["model.language_model.embed_tokens.weight"].clone()
    save_file({**older, "lm_head.weight": head}, path / "model.safetensors")
    hf_to_dcp(path, tmp_path / "dcp")
    dcp_to_hf(tmp_path / "dcp", tmp_path / "out")
    after = stored(tmp_path / "out")
    assert after.keys() == older.keys()
    assert all(torch.equal(after[name], one) for name, one in older.items())
    dcp_to_hf(tmp_path / "dcp", tmp_path / "narrow", dtype="bfloat16", max_shard_bytes=100_000)
    narrow = stored(tmp_path / "narrow")
    assert {name for name, one in narrow.items() if one.dtype == torch.bfloat16} == set(filter(is_text, older))
    config = json.loads((tmp_path / "narrow" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")


@pytest.mark.full
def test_what_cannot_be_trained_is_refused_in_a_line(pool: WorkerPool, tmp_path: Path) -> None:
    toml = write_toml("gemma3", tmp_path)
    image = [{"type": "image", "url": "x.png"}, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = {
        "part": {"messages": [{"role": "user", "content": image}, turns[1]]},
        "key": {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, turns[1]]
        },
        "column": {"messages": turns, "images": ["x.png"]},
        "prompt": {"prompt": "a", "completion": "b", "image": {"path": "x.png"}},
    }
    for name, row in rows.items():
        without = {"messages": turns, "images": [None]} if "messages" in row else {**row, "image": ""}
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(without)}\n{json.dumps(row)}\n")
    mistakes = {
        (f"data.path='{tmp_path}/part.jsonl'",): "part.jsonl:2: messages[0].content[0] is of type image",
        (f"data.path='{tmp_path}/key.jsonl'",): "messages[0].content[0] is of type image, and only text is trained",
        (f"data.path='{tmp_path}/column.jsonl'",): "column.jsonl:2: 'images' is of type image",
        (
            f"data.path='{tmp_path}/prompt.jsonl'",
            "data.format='prompt_completion'",
        ): "prompt.jsonl:2: 'image' is of",
        ("model.weights='random'", "checkpoint.export_hf='never'"): "has other parts beside the text part",
        ("model.config.num_hidden_layers=1",): "in its safetensors and unknown to",
        ("lora={rank=4, target_modules='.*q_proj'}",): "matches model.vision_tower",
    }
    assert_refused(pool, toml, mistakes, tmp_path)


def test_a_text_part_without_some_of_its_layers_is_refused(tmp_path: Path) -> None:
    """Its export would copy them as they are."""
    section = ModelConfig(path=str(write_whole("gemma3", tmp_path)), config={"num_hidden_layers": 1})
    model: Any = build_model(section)
    materialize(model, device=torch.device("cpu"))
    with pytest.raises(UserError, match="in its safetensors and unknown to Gemma3ForCausalLM"):
        load_pretrained(model, allow_unexpected=True)


def test_a_whole_that_does_more_with_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(ModelConfig(path=str(write_whole("gemma3", tmp_path))))
    whole, traits = weights_of(model).names.whole, inspect_model(model)
    assert whole is not None
    whole.check_same_logits(traits.small_copy())
    forward = Gemma3ForConditionalGeneration.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        return type(found)(logits=found.logits * 1.01)

    monkeypatch.setattr(Gemma3ForConditionalGeneration, "forward", scaled)
    with pytest.raises(UserError, match="its logits of text are others than those of its text part alone"):
        whole.check_same_logits(traits.small_copy())

    def lacking(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("it needs timm\n(pip install timm)")

    monkeypatch.setattr(Gemma3ForConditionalGeneration, "__init__", lacking)
    with pytest.raises(UserError, match=r"cannot build the whole \(it needs timm \(pip install timm\)\)"):
        build_model(ModelConfig(path=str(tmp_path / "gemma3")))


def test_a_class_that_is_made_for_a_text_part_is_not_for_others(tmp_path: Path) -> None:
    model: Any = build_model(ModelConfig(path=str(write_whole("qwen3_vl", tmp_path))))
    with pytest.raises(UserError, match="no language model that predicts the next token"):
        load_hf_config(ModelConfig(config={"model_type": "qwen3_vl_text"}))
    materialize(model, device=torch.device("cpu"))
    load_pretrained(model)
    padded, mask = torch.tensor([[0, 0, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1, 1]])
    options = {"max_new_tokens": 4, "do_sample": False}
    found = model.eval().generate(padded, attention_mask=mask, **options)
    assert torch.equal(found[:, 2:], model.generate(padded[:, 2:], **options))


def test_assets_are_of_a_model_and_of_a_flat_config(tmp_path: Path) -> None:
    """An adapter beside a model is not copied; some wholes have their text part's fields beside their own."""
    path = write_whole("gemma3", tmp_path)
    (path / "adapter_config.json").write_text("{}")
    whole = AutoConfig.from_pretrained(path)
    text = text_config_of(whole)
    assert text is not None
    text.vocab_size += 8
    flat = json.loads((path / "config.json").read_text())
    del flat["text_config"]
    for fields in (None, flat):
        if fields is not None:
            (path / "config.json").write_text(json.dumps(fields))
        out = tmp_path / str(fields is None)
        out.mkdir()
        save_assets(out, config=text, architecture="Any", tokenizer=None, source=path, whole=whole)
        after = json.loads((out / "config.json").read_text())
        assert (after if fields else after["text_config"])["vocab_size"] == text.vocab_size
        assert not (out / "adapter_config.json").exists()
