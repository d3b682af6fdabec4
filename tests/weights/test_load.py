"""Loading safetensors into (sharded) models, and random initialisation that no mesh can change."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaPreTrainedModel, LlamaRMSNorm

from fsdp2kit.config import schema
from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job import distributed
from fsdp2kit.model.build import build_model, materialize, model_on_meta
from fsdp2kit.model.inspect import shrink_config
from fsdp2kit.parity.engine import whole
from fsdp2kit.weights import shards
from fsdp2kit.weights.adapters import Adapter, base_name, is_of_adapter
from fsdp2kit.weights.conversion import match_files, to_file_names
from fsdp2kit.weights.entries import grouped_entries
from fsdp2kit.weights.experts import expert_count, experts_per_token, is_mixture
from fsdp2kit.weights.initialize import initialize
from fsdp2kit.weights.load import load_pretrained, open_pretrained
from fsdp2kit.weights.record import ModelSource, find_ties
from fsdp2kit.weights.shards import fill_vocabulary, row_blocks
from fsdp2kit.weights.stored import INDEX_NAME, some, usual_dtype
from fsdp2kit.weights.transfer import MappingReader, in_blocks, transfer
from fsdp2kit.weights.whole import Whole
from tests.model.helpers import UNUSUAL, sharded
from tests.support.models import TINY, full, slow, tiny_model, tiny_model_dir
from tests.support.parts import read_all
from tests.support.workers import WorkerPool


def _empty(path: Path, **overrides: Any) -> PreTrainedModel:
    model = build_model(ModelConfig(path=str(path), config=overrides))
    materialize(model, device=torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def _loaded(path: Path) -> dict[str, Tensor]:
    model = _empty(path)
    load_pretrained(model, path)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _plain(path: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_dtypes_are_widened(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tiny_model_dir("smollm2", tmp_path, dtype=dtype)
    stored = load_file(path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    found = _loaded(path)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    _assert_equal(found, {name: stored[name].float() for name in found})


@pytest.mark.parametrize("kind", TINY)
def test_several_files_equal_one(kind: str, tmp_path: Path) -> None:
    tiny_model(kind).save_pretrained(tmp_path, max_shard_size="60KB")
    names = json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"]
    assert len(set(names.values())) > 1
    _assert_equal(_loaded(tmp_path), _plain(tmp_path))


@pytest.mark.parametrize("are_there", [True, False])
def test_one_file_comes_before_an_index_of_another_save(are_there: bool, tmp_path: Path) -> None:
    """As in transformers: the index, and perhaps its files, are of an earlier save."""
    model = tiny_model("llama3")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = {file: file.read_bytes() for file in tmp_path.glob("model-*.safetensors")}
    index = (tmp_path / INDEX_NAME).read_text()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    model.save_pretrained(tmp_path)
    (tmp_path / INDEX_NAME).write_text(index)
    for file, content in shards.items() if are_there else ():
        file.write_bytes(content)
    _assert_equal(_loaded(tmp_path), _plain(tmp_path))


@pytest.mark.parametrize("stored_as", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_weight_may_be_stored_under_either_name(stored_as: str, tmp_path: Path) -> None:
    path = tiny_model_dir("smollm2", tmp_path)
    expected = _plain(path)
    tensors = load_file(path / "model.safetensors")
    value = tensors.pop("model.embed_tokens.weight")
    names = ["model.embed_tokens.weight", "lm_head.weight"] if stored_as == "both" else [stored_as]
    save_file({**tensors, **{name: value.clone() for name in names}}, path / "model.safetensors")
    _assert_equal(_loaded(path), expected)


def test_experts_are_stacked_by_their_numbers(tmp_path: Path) -> None:
    """Expert 10 follows expert 9. As text its name follows that of expert 1."""
    path = tiny_model_dir("qwen3_moe", tmp_path, num_experts=12)
    _assert_equal(_loaded(path), _plain(path))


def test_a_tied_weight_that_is_stored_twice_and_differs_is_refused(tmp_path: Path) -> None:
    """transformers unties them: one tensor would be another model."""
    path = tiny_model_dir("smollm2", tmp_path)
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors")
    assert _plain(path).keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    with pytest.raises(UserError, match=r"lm_head\.weight differ, .*tie_word_embeddings = false"):
        _loaded(path)


@pytest.mark.parametrize(("size", "shard"), [(2, 2), slow(3, 3), full(4, 2)])
def test_shards_equal_the_whole(size: int, shard: int, pool: WorkerPool, tmp_path: Path) -> None:
    kinds = ("smollm2", "llama3", "mixtral", "gemma3")
    for kind in kinds:
        tiny_model_dir(kind, tmp_path)
    # Its head is stored as `embed_out`, by a mapping that goes by the class's name.
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    neox = AutoConfig.for_model("gpt_neox", num_attention_heads=4, **sizes)
    AutoModelForCausalLM.from_config(neox).save_pretrained(tmp_path / "gpt_neox")
    kinds = (*kinds, "gpt_neox")
    for rank in pool.run(size, _load_sharded, tmp_path, kinds, shard):
        for kind in kinds:
            _assert_equal(rank[kind], _plain(tmp_path / kind))


@pytest.mark.parametrize("kind", [*TINY, "gpt_neox", "qwen3_moe", "deepseek_v3"])
def test_file_names_are_those_of_save_pretrained_and_lead_back(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind) if kind in TINY else AutoModelForCausalLM.from_config(_config(kind))
    model.save_pretrained(tmp_path)
    tensors = {name: t for name, t in model.state_dict().items() if name not in find_ties(model)}
    groups = grouped_entries(model, {name: tensor.to("meta") for name, tensor in tensors.items()})
    stored: dict[str, Tensor] = {}
    for group in groups:
        stored |= to_file_names(model, {name: tensors[name] for name in group.sources})
    _assert_equal(stored, load_file(tmp_path / "model.safetensors"))

    match = match_files(model, {name: tensor.to("meta") for name, tensor in stored.items()})
    found = transfer(match.entries, MappingReader(stored), read_all)
    assert not match.unexpected
    _assert_equal(found, tensors)


def _load_sharded(folder: Path, kinds: tuple[str, ...], shard: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for kind in kinds:
        model = sharded(ModelConfig(path=str(folder / kind)), shard)
        load_pretrained(model, folder / kind)
        found[kind] = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return found


# What is wrong with the files


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({UP: None}, r"smollm2: model\.layers\.1\.mlp\.up_proj\.weight is not in .* of Llama"),
        ({"model.extra.weight": torch.ones(2)}, r"smollm2: model\.extra\.weight is in its safetensors and unknown"),
        ({"model.norm.weight": torch.ones(71)}, r"norm\.weight: stored with shape \[71\], but the model wants \[72\]"),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, None),  # old files hold it
    ],
    ids=["missing", "unexpected", "shape", "frequencies"],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, Any], says: str | None, tmp_path: Path) -> None:
    path = tiny_model_dir("smollm2", tmp_path)
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({name: one for name, one in tensors.items() if one is not None}, path / "model.safetensors")
    with nullcontext() if says is None else pytest.raises(UserError, match=says):
        _loaded(path)


@pytest.mark.parametrize(
    ("unused", "says"), [(True, None), (False, r"norm\.weight: cannot be read as F6_E2M3")], ids=["unused", "used"]
)
def test_a_dtype_that_torch_lacks_matters_only_where_it_is_used(
    unused: bool, says: str | None, tmp_path: Path
) -> None:
    path = tiny_model_dir("smollm2", tmp_path)
    file = path / "model.safetensors"
    name = "model.extra.weight" if unused else "model.norm.weight"
    save_file({**load_file(file), name: torch.zeros(54, dtype=torch.uint8)}, file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[name] |= {"dtype": "F6_E2M3", "shape": [72]}  # 72 numbers of 6 bits
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    model = _empty(path)
    with nullcontext() if says is None else pytest.raises(UserError, match=says):
        load_pretrained(model, path, allow_unexpected=True)


@pytest.mark.parametrize("width", [1, 71])
def test_a_short_embedding_is_completed_only_at_the_models_width(width: int, tmp_path: Path) -> None:
    path = tiny_model_dir("llama3", tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    save_file({**tensors, name: tensors[name][:-1, :width].contiguous()}, file)
    says = rf"embed_tokens\.weight: stored with shape \[127, {width}\], but the model wants \[128, 72\]"
    with pytest.raises(UserError, match=says), open_pretrained(model_on_meta(path), path, grow=True):
        pass


@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.999])
def test_a_truncated_file_is_named(kept: float, tmp_path: Path) -> None:
    path = tiny_model_dir("smollm2", tmp_path)
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(UserError, match=r"model\.safetensors: is not a whole safetensors file"):
        _loaded(path)


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    tiny_model("smollm2").save_pretrained(tmp_path, max_shard_size="60KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=rf"{gone.name}: is named in the index but missing"):
        _loaded(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"metadata": {}}', '{"weight_map": [1]}'])
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    path = tiny_model_dir("smollm2", tmp_path)
    (path / "model.safetensors").unlink()
    (path / INDEX_NAME).write_text(text)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json: is not a safetensors index"):
        _loaded(path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    path = tiny_model_dir("smollm2", tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model\.path: .* has no model\.safetensors"):
        _loaded(path)


# Random initialisation


def _config(kind: str) -> PretrainedConfig:
    if kind in TINY:
        return tiny_model(kind).config
    if kind != "modernbert-decoder":
        return shrink_config(AutoConfig.for_model(kind))
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoConfig.for_model(kind, **sizes, vocab_size=128, pad_token_id=0)


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        (("smollm2",), (1, 3)),
        full(("smollm2", "llama3", "mixtral", "gemma3"), (1, 2, 3)),
        full(UNUSUAL, (1, 2)),
    ],
    ids=str,
)
def test_random_values_do_not_depend_on_the_mesh(
    kinds: tuple[str, ...], sizes: tuple[int, ...], pool: WorkerPool, tmp_path: Path
) -> None:
    for kind in kinds:
        _config(kind).save_pretrained(tmp_path / kind)
    one, *others = [rank for size in sizes for rank in pool.run(size, _initialize_sharded, tmp_path, kinds, 0, size)]
    for kind in kinds:
        assert all(value.isfinite().all() for value in one[kind].values())
        for other in others:
            _assert_equal(other[kind], one[kind])
    other_seed = pool.run(1, _initialize_sharded, tmp_path, kinds[:1], 1, 1)[0][kinds[0]]
    assert not any(torch.equal(value, other_seed[name]) for name, value in one[kinds[0]].items() if value.ndim > 1)


def test_an_initialisation_that_leaves_a_parameter_out_is_refused(tmp_path: Path) -> None:
    _config("apertus").save_pretrained(tmp_path)
    try:
        model = sharded(ModelConfig(path=str(tmp_path), weights="random"), 1)
    finally:
        distributed.stop()
    with pytest.raises(UserError, match=r" ApertusForCausalLM leaves model\.layers\.0\.mlp\.act_fn\.alpha_\w out"):
        initialize(model, seed=0)


@pytest.mark.parametrize("how", ["data", "view", "swapped"])
def test_whatever_an_initialisation_reaches_for_is_found(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However a model's own code writes: past autograd, to part of a tensor, or by putting another in its place."""

    def init_weights(self: object, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight)
        if isinstance(module, LlamaMLP) and how == "data":
            module.up_proj.weight.data.copy_(module.gate_proj.weight.data * 2)
        elif isinstance(module, LlamaMLP) and how == "view":
            module.up_proj.weight[1].copy_(module.gate_proj.weight[1])
        elif isinstance(module, LlamaRMSNorm):
            if how == "swapped":
                module.weight = nn.Parameter(torch.full_like(module.weight, 3.0))
            else:
                nn.init.ones_(module.weight)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", init_weights)
    tiny_model("smollm2").config.save_pretrained(tmp_path)
    model = build_model(ModelConfig(path=str(tmp_path), weights="random"))
    materialize(model, device=torch.device("cpu"))
    before = dict(model.named_parameters())
    initialize(model, seed=0)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    mlp, norm = model.model.layers[1].mlp, model.model.layers[1].input_layernorm
    up, gate = mlp.up_proj.weight, mlp.gate_proj.weight
    assert gate.std().item() == pytest.approx(1, abs=0.1)
    if how == "data":
        assert torch.equal(up, gate * 2)
    elif how == "view":
        assert torch.equal(up[1], gate[1])
        assert up[0].std() > 0.5
    assert norm.weight.unique().tolist() == [3.0 if how == "swapped" else 1.0]


def _initialize_sharded(folder: Path, kinds: tuple[str, ...], seed: int, shard: int) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(torch.distributed.get_rank())  # the generators of the ranks must not matter
    found = {}
    for kind in kinds:
        model = sharded(ModelConfig(path=str(folder / kind), weights="random"), shard)
        initialize(model, seed=seed)
        found[kind] = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return found


@pytest.mark.parametrize("kind", [*TINY, *UNUSUAL])
def test_random_values_are_distributed_as_transformers_own(kind: str, tmp_path: Path) -> None:
    config = _config(kind)
    config.save_pretrained(tmp_path)
    model = build_model(ModelConfig(path=str(tmp_path), weights="random"))
    materialize(model, device=torch.device("cpu"))
    initialize(model, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    drawn = {}
    for name, ours in model.named_parameters():
        expected, count = theirs[name], ours.numel()
        if expected.std() == 0:
            assert torch.equal(ours, expected), name
            continue
        # five standard errors, of a mean and of a standard deviation
        assert (ours.mean() - expected.mean()).abs() < 5 * expected.std() * (2 / count) ** 0.5, name
        assert (ours.std() / expected.std() - 1).abs() < 5 / count**0.5, name
        drawn[name] = ours.flatten()[:64].tolist()
    values = list(drawn.values())
    assert all(values[i] != values[j] for i in range(len(values)) for j in range(i)), "two tensors are drawn alike"


@pytest.mark.parametrize("elements", [1, 3, 6, 7, 100])
def test_the_rows_of_a_tensor_are_read_in_blocks(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_BLOCK", elements)
    tensor = torch.arange(21).view(7, 3)
    blocks = [*row_blocks(tensor, tensor.shape)]
    assert torch.equal(torch.cat(blocks), tensor)
    assert max(len(block) for block in blocks) == min(7, max(1, elements // 3))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_rows_of_new_tokens_are_the_mean_of_the_others_in_any_blocks(size: int) -> None:
    stored = torch.randn(5, 3)
    target = torch.full((7, 3), torch.nan)
    fill_vocabulary(target, stored.split(size), new_tokens=[1, 4, 5, 6])
    mean = stored[[0, 2, 3]].double().mean(0).float()
    assert torch.equal(target[[0, 2, 3]], stored[[0, 2, 3]])
    torch.testing.assert_close(target[[1, 4, 5, 6]], mean.expand(4, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_blocks_have_16_mib_in_any_dtype(dtype: torch.dtype) -> None:
    blocks = in_blocks(torch.empty(5, 1 << 21, dtype=dtype, device="meta"))
    assert {block.nbytes for block in blocks[:-1]} == {1 << 24}
    assert sum(block.numel() for block in blocks) == 5 << 21


def test_the_usual_dtype_is_that_of_most_floating_point_tensors(tmp_path: Path) -> None:
    dtypes = [torch.int64] * 3 + [torch.bfloat16] * 2 + [torch.float32]
    save_file(
        {str(at): torch.zeros(1 + 9 * at, dtype=one) for at, one in enumerate(dtypes)}, tmp_path / "model.safetensors"
    )
    assert usual_dtype(tmp_path) == "bfloat16"
    save_file({"a": torch.zeros(1, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert usual_dtype(tmp_path) == "float32"


def test_three_names_are_listed_and_the_others_counted() -> None:
    assert [some([*names]) for names in ("a", "ab", "abc", "abcde")] == [
        "a is",
        "a, b are",
        "a, b, c are",
        "a, b, c and 2 more are",
    ]


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("lora.rank", {"r": 5}),
        ("lora.alpha", {"lora_alpha": 9}),
        ("lora.rslora", {"use_rslora": True}),
        ("lora.dora", {"use_dora": True}),
        ("lora.modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("lora.target_modules", {"rank_pattern": {"a": 2}}),
        ("lora.target_modules", {"alpha_pattern": {"a": 2}}),
        ("lora.target_modules", {"layers": ("a", "b")}),
        ("lora.quantize", {"quantize": "nf4"}),
        (None, {"lora_dropout": 0.1}),
    ],
)
def test_each_option_but_dropout_is_in_an_adapters_identity(key: str | None, changed: dict[str, Any]) -> None:
    def identity(*, layers: tuple[str, ...] = ("a",), quantize: str = "none", **options: Any) -> dict[str, str]:
        return Adapter(LoraConfig(**{"r": 4, **options}), layers, None, quantize).identity()

    one = identity()
    other = identity(**changed)
    assert {name for name in {**one, **other} if one.get(name) != other.get(name)} == ({key} if key else set())


@pytest.mark.parametrize(
    ("name", "base", "is_adapters"),
    [
        ("a.q.lora_A.default.weight", None, True),
        ("a.q.lora_magnitude_vector.default.weight", None, True),
        ("a.embed.lora_embedding_A.default", None, True),
        ("a.q.base_layer.base_layer.weight", "a.q.weight", False),
        ("head.original_module.weight", "head.weight", False),
        ("head.modules_to_save.default.weight", "head.weight", True),
        ("a.lora_A.defaults.weight", "a.lora_A.defaults.weight", False),
    ],
)
def test_a_name_in_a_peft_model_is_the_bases_or_the_adapters(name: str, base: str | None, is_adapters: bool) -> None:
    assert (base_name(name), is_of_adapter(name)) == (base, is_adapters)


def test_how_many_experts_a_config_names() -> None:
    def config(**values: Any) -> PretrainedConfig:
        return PretrainedConfig(**values)

    assert [
        expert_count(config(**{name: 4})) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ] == [4] * 3
    assert expert_count(config(num_experts=None, num_local_experts=8)) == 8
    assert [is_mixture(config(num_experts=count)) for count in (None, 1, 2)] == [False, False, True]
    assert [experts_per_token(config(moe_topk=count)) for count in (2, [2, 2])] == [2, None]
    assert experts_per_token(config()) is None


@pytest.mark.parametrize(
    ("path", "dtype", "has_adapter", "expected"),
    [
        ("x", torch.bfloat16, False, "bfloat16"),
        ("x", torch.bfloat16, True, "float32"),
        ("x", None, False, "float32"),
        (None, torch.bfloat16, False, "float32"),
    ],
)
def test_the_dtype_of_an_export(path: str | None, dtype: torch.dtype | None, has_adapter: bool, expected: str) -> None:
    assert ModelSource(path, None, PretrainedConfig(dtype=dtype), has_adapter=has_adapter).dtype == expected


def test_names_of_a_text_part_end_at_a_point() -> None:
    names = Whole(nn.Module(), (("model", "model.text"), ("lm_head", "lm_head")), PretrainedConfig())
    pairs = [("model", "model.text"), ("model.norm.weight", "model.text.norm.weight"), ("lm_head.weight",) * 2]
    assert [(names.inner(there), names.outer(own)) for own, there in pairs] == pairs
    assert (
        names.outer("models.weight") is names.inner("model.texts.weight") is names.inner("model.vision.weight") is None
    )


def test_a_module_that_is_trained_whole_begins_with_the_values_of_the_frozen_one(tmp_path: Path) -> None:
    _config("llama3").save_pretrained(tmp_path)
    found = []
    for lora in (None, schema.LoraConfig(rank=2, target_modules=["q_proj"], modules_to_save=["down_proj"])):
        model = build_model(ModelConfig(path=str(tmp_path), weights="random"), lora=lora)
        materialize(model, device=torch.device("cpu"))
        for parameter in model.parameters():
            parameter.data.fill_(math.nan)
        initialize(model, seed=3)
        found.append([value for name, value in model.named_parameters() if "layers.1.mlp.down_proj" in name])
    [plain], copies = found
    assert [torch.equal(copy, plain) for copy in copies] == [True, True]
