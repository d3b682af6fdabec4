"""A real vLLM serves what runs export, where there is one: adapters, merged models and wholes (docs/lora.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ImageProcessor, Gemma3Processor

from tests.rl.helpers.vllm import GREEDY, assert_greedy, free_port, greedy, path_in_environment, tune, vllm_server
from tests.support.parts import load_class, write_whole
from tests.support.workers import WorkerPool
from tools import dcp_to_hf

SLACK = 1e-3  # float32 logits of about 10, by other kernels, over 30 layers


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_vllm_answers_as_transformers_do(pool: WorkerPool, tmp_path: Path) -> None:
    python, model = path_in_environment("FSDP2KIT_VLLM_PYTHON"), path_in_environment("FSDP2KIT_SMOLLM2")
    tune(pool, tmp_path, model, "lora.rank=8", "lora.alpha=16", "optimizer.lr=2e-3")
    adapter, merged = tmp_path / "run" / "hf", tmp_path / "merged"
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000006"
    assert dcp_to_hf.main([str(checkpoint), str(merged), "--merge", str(model), "--dtype", "float32"]) == 0

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [tokenizer(text).input_ids for text in GREEDY]
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = {}
    with_adapter = ("--enable-lora", "--max-lora-rank", 8, "--lora-modules", f"tuned={adapter}")
    for name, served, options in (
        ("tuned", model, with_adapter),
        ("merged", merged, ("--served-model-name", "merged")),
    ):
        folder = tmp_path / f"serving_{name}"
        folder.mkdir()
        with vllm_server(python, served, folder, dtype="float32", port=free_port(), options=options) as url:
            answers[name] = [greedy(url, name, ids) for ids in asked]
    plain: Any = PeftModel.from_pretrained(base, str(adapter)).eval()
    transformers_merged: Any = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    changed = False
    for at, ids in enumerate(asked):
        assert_greedy(plain, ids, answers["tuned"][at], slack=SLACK)
        assert_greedy(transformers_merged, ids, answers["merged"][at], slack=SLACK)
        with plain.disable_adapter(), torch.no_grad():
            before = base(input_ids=torch.tensor([[*ids, *answers["tuned"][at]]])).logits[0, len(ids) - 1 : -1]
        changed |= before.argmax(dim=-1).tolist() != answers["tuned"][at]
    assert changed, "the adapter changes none of these answers"


@pytest.mark.timeout(1800)
def test_vllm_answers_as_the_whole_of_a_tuned_text_part(pool: WorkerPool, tmp_path: Path) -> None:
    """vLLM loads the vision tower, too, for which it needs torchvision."""
    python = path_in_environment("FSDP2KIT_VLLM_PYTHON")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # that vLLM's kernels take
    source = write_whole("gemma3", tmp_path, max_position_embeddings=512, **heads)
    _write_processor(source)
    tune(pool, tmp_path, source, "optimizer.lr=1e-2")
    served = tmp_path / "run" / "hf"
    assert (served / "processor_config.json").read_bytes() == (source / "processor_config.json").read_bytes()
    asked = [AutoTokenizer.from_pretrained(source)(text).input_ids for text in GREEDY]
    options = ("--served-model-name", "whole", "--limit-mm-per-prompt", '{"image": 0}')
    with vllm_server(python, served, tmp_path, dtype="float32", port=free_port(), options=options) as url:
        answers = [greedy(url, "whole", ids) for ids in asked]
    whole, before = load_class("gemma3", served), load_class("gemma3", source)
    for ids, answer in zip(asked, answers, strict=True):
        assert_greedy(whole, ids, answer, slack=SLACK)
    with pytest.raises(AssertionError):  # it has learnt
        assert_greedy(before, asked[0], answers[0], slack=SLACK)


def _write_processor(path: Path) -> None:
    """Give the demo's tokenizer the tokens that Gemma 3's processor, and vLLM's, look for."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    boi, eoi, image = tokenizer.convert_ids_to_tokens([129, 130, 128])
    names = {"boi_token": boi, "eoi_token": eoi, "image_token": image}
    tokenizer = AutoTokenizer.from_pretrained(path, extra_special_tokens=names)
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
    images = Gemma3ImageProcessor(size={"height": 28, "width": 28})
    Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=1).save_pretrained(path)
