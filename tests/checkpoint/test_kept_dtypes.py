"""What transformers keeps in float32 under ``dtype=torch.bfloat16`` stays so, bit for bit, in every file we write."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsdp2kit.checkpoint.from_hf import compare_logits, hf_to_dcp
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.manifest import read_manifest
from fsdp2kit.checkpoint.merge import merge_to_hf
from fsdp2kit.checkpoint.run import build_checkpoints
from fsdp2kit.config import TrainingConfig
from fsdp2kit.job.events import Events
from fsdp2kit.parity.reference import load_plain
from fsdp2kit.weights.record import ModelSource, weights_of
from tests.checkpoint import helpers
from tests.checkpoint.helpers import assert_equal, exported
from tests.support.kept_dtypes import BEYOND_5_17, kept_model
from tests.support.models import full, slow

_NAMES = re.compile(r"_keep_in_fp32_modules(_strict)? = \[[^\]]")
# Causal language models whose classes name tensors to keep, by the text of their modules: nothing is imported for it.
_FOLDERS = {
    path.parent.name
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    if _NAMES.search(path.read_text(encoding="utf-8"))
}
NAMED = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if model_type_to_module_name(kind) in _FOLDERS]
BUILT = ["olmo_hybrid", "zamba", "zaya"]
"""Those that create a tensor in float32 themselves, by a look at all families of 5.23."""
CHEAP = ["glm4_moe", "ernie4_5_moe", "zaya"]
"""A buffer that is named, parameters that are named, a buffer that is built so; the others are `full` in float16, for
which both lists of names count."""
ODD = ("afmoe", "deepseek_v4")
"""In bfloat16: one whose names do not count, and the one with the most of them."""
UNBUILT = {
    "dots3_note": "the config of text and images",
    "dots3_note_text": "its layers' sizes are attributes of each layer, which a config of small ones cannot set",
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *itertools.product(CHEAP, (torch.bfloat16, torch.float16)),
        *(full(kind, torch.float16) for kind in NAMED + BUILT if kind not in CHEAP),
        *((full if kind in ODD else slow)(kind, torch.bfloat16) for kind in NAMED + BUILT if kind not in CHEAP),
    ],
    ids=str,
)
def test_an_export_is_what_transformers_loads_in_its_dtype(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if kind in UNBUILT:
        pytest.skip(f"{kind}: {UNBUILT[kind]}")
    kept_model(kind).save_pretrained(tmp_path / "source")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=dtype)
    loaded.save_pretrained(tmp_path / "expected")
    hf_to_dcp(tmp_path / "source", tmp_path / "dcp")
    dcp_to_hf(tmp_path / "dcp", tmp_path / "export", dtype=str(dtype).removeprefix("torch."))
    assert_equal(exported(tmp_path / "export"), exported(tmp_path / "expected"))
    kept = {tensor.dtype for tensor in exported(tmp_path / "export").values() if tensor.is_floating_point()}
    assert kept == {dtype, torch.float32} or (dtype, kind) in _WITHOUT


# Models whose names count for float16 alone.
_WITHOUT = {(torch.bfloat16, kind) for kind in ("afmoe", "gpt_oss", "longcat_flash", "rwkv")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_a_merge_keeps_them(tmp_path: Path) -> None:
    kind = "ernie4_5_moe"
    kept_model(kind).save_pretrained(tmp_path / kind)
    adapter = tmp_path / "adapter"
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(load_plain(tmp_path / kind), lora)
    model.save_pretrained(adapter)
    trained = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    tensors = {f"model.{name.removeprefix('base_model.model.')}": tensor for name, tensor in trained.items()}
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shutil.copy(tmp_path / kind / "config.json", adapter)
    merge_to_hf(tmp_path / "dcp", tmp_path / "merged", config_dir=adapter, dtype="bfloat16")

    model.merge_and_unload().save_pretrained(tmp_path / "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "expected")
    assert_equal(exported(tmp_path / "merged"), exported(tmp_path / "expected"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["ernie4_5_moe", pytest.param("deepseek_v4", marks=[pytest.mark.full, BEYOND_5_17])])
def test_a_directory_that_keeps_them_becomes_a_checkpoint_and_comes_back(kind: str, tmp_path: Path) -> None:
    kept_model(kind).save_pretrained(tmp_path / "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "source")
    hf_to_dcp(tmp_path / "source", tmp_path / "dcp")
    assert read_manifest(tmp_path / "dcp").export_dtype == "bfloat16"
    assert "gives the same logits" in compare_logits(tmp_path / "dcp", tmp_path / "source")
    dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    assert_equal(exported(tmp_path / "back"), exported(tmp_path / "source"))


class OwnForCausalLM(LlamaForCausalLM):
    """The model has code of its own, so an export knows only what the checkpoint records."""

    _keep_in_fp32_modules_strict = ("q_proj",)  # float16 alone goes by the name without "strict"
    _keep_in_fp32_modules = ("norm",)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_with_code_of_its_own_keeps_them(tmp_path: Path, dtype: str) -> None:
    config = helpers.tiny_llama().config
    config.auto_map = {"AutoModelForCausalLM": "own.OwnForCausalLM"}
    model = OwnForCausalLM(config)
    model.save_pretrained(tmp_path / "source")
    weights_of(model).source = ModelSource(str(tmp_path / "source"), tmp_path / "source", config)
    job: Any = SimpleNamespace(environment={}, events=Events())
    run, section = {"dir": str(tmp_path)}, {"export_dtype": dtype}
    settings = TrainingConfig.model_validate({"recipe": "sft", "run": run, "checkpoint": section})
    data: Any = SimpleNamespace(fingerprint="of the data", total_steps=1, endings=(), contents={})
    with build_checkpoints(settings, model, helpers.adamw(model), job=job, data=data, tokenizer=None) as checkpoints:
        checkpoints.save(helpers.progress_at(1), is_over=True)
    loaded = OwnForCausalLM.from_pretrained(tmp_path / "source", dtype=getattr(torch, dtype))
    loaded.save_pretrained(tmp_path / "expected")
    assert_equal(exported(tmp_path / "hf"), exported(tmp_path / "expected"))
    assert {str(tensor.dtype) for tensor in exported(tmp_path / "hf").values()} == {"torch.float32", f"torch.{dtype}"}
