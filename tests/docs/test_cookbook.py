"""docs/cookbook.md: its TOMLs load, its notebook runs, and its tool-use recipe is carried out from end to end."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fsdp2kit.config.checks import check_config
from fsdp2kit.run import load

ROOT = Path(__file__).resolve().parents[2]
COOKBOOK = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w+)\n(.*?)^```", COOKBOOK, re.MULTILINE | re.DOTALL)
TOMLS = [text for language, text in FENCES if language == "toml"]
TOOL_USE = next(text for text in TOMLS if "calls.parquet" in text)

CITIES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito", "Sofia", "Dublin", "Madrid", "Berlin"]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


@pytest.mark.parametrize("text", TOMLS, ids=lambda text: re.findall(r"(?:path|dir) = \"(.*?)\"", text)[-1])
def test_every_toml_loads(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "recipes" / "sft.py", tmp_path / "my_recipe.py")
    _, config = load(str(tmp_path / "x.toml"), [])
    world_size = 16 if config.fsdp.strategy == "hybrid_shard" else config.mesh.cp
    check_config(config, world_size=world_size, local_world_size=min(8, world_size))


@pytest.mark.full
def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = next(text for language, text in FENCES if language == "python")
    exec(compile(code, "cell", "exec", dont_inherit=True), {})
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])) == 4


@pytest.mark.slow
def test_a_first_hour(tmp_path: Path) -> None:
    """Preview, training with context parallelism, kill -9, an early stop, the best step exported; then plain
    transformers calls the tool, and stops."""
    rows = [conversation(number) for number in range(5_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "calls.parquet")
    write_base_model(tmp_path / "base", [json.dumps(row) for row in rows[:500]])
    toml = tmp_path / "tools.toml"
    # A random model instead of one with knowledge: it needs another rate, and is evaluated more often.
    toml.write_text(TOOL_USE, encoding="utf-8")
    overrides = ["optimizer.lr=3e-3", "eval.every=10", "fsdp.param_dtype=float32", "checkpoint.every=10"]

    preview = json.loads(run([sys.executable, str(ROOT / "tools/preview.py"), str(toml), "--json"], tmp_path))
    lost = {each["seq_len"]: each["tokens_lost"] for each in preview["choices"]}
    overrides += [f"data.seq_len={min(length for length, tokens in lost.items() if tokens == 0)}"]

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fsdp2kit.run"]
    command = [*torchrun, str(toml), *overrides]
    metrics = tmp_path / "runs" / "tools" / "metrics.jsonl"
    killed = subprocess.Popen(command, cwd=tmp_path, env=environment())
    while not (tmp_path / "runs/tools/checkpoints/step-000010/manifest.json").is_file():
        assert killed.poll() is None
        time.sleep(0.1)
    rank = json.loads((tmp_path / "runs/tools/.lock").read_text(encoding="utf-8"))["pid"]
    os.kill(rank, signal.SIGKILL)
    killed.wait()  # torchrun ends the other rank
    console = run(command, tmp_path)
    assert "resumed from step" in console
    assert "stopped early" in console

    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    best = min((record["eval_loss"], record["step"]) for record in records if "eval_loss" in record)
    assert best[1] < records[-1]["step"]
    assert json.loads((tmp_path / "runs/tools/hf/.fsdp2kit-export.json").read_text())["step"] == best[1]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/tools/hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs/tools/hf")
    asked = [{"role": "user", "content": "What is the weather in Oslo in 17 days?"}]
    prompt = tokenizer.apply_chat_template(asked, tools=[TOOL], add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=128, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert len(answer) < 128, "it stops at its end of turn"
    text = tokenizer.decode(answer)
    call = json.loads(re.findall(r"<tool_call>\s*(\{.*\})\s*</tool_call>", text, re.DOTALL)[0])
    assert call["name"] == "get_weather"
    assert call["arguments"]["city"] in CITIES


def conversation(number: int) -> dict[str, Any]:
    """A row in OpenAI's form: arguments are a JSON string, and a turn that calls a tool has no content."""
    draw = random.Random(number)
    city, days, weather = draw.choice(CITIES), number % 400 + 1, draw.choice(["sunny", "cloudy", "rainy"])
    call = {"name": "get_weather", "arguments": json.dumps({"city": city, "days": days})}
    calls = [{"id": f"call_{number}", "type": "function", "function": call}]
    return {
        "messages": [
            {"role": "user", "content": f"What is the weather in {city} in {days} days?"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": weather},
            {"role": "assistant", "content": f"It will be {weather} in {city}."},
        ],
        "tools": [TOOL],
    }


def write_base_model(folder: Path, texts: list[str]) -> None:
    """A small random Llama whose tokenizer has no chat template and no token of one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def run(command: list[str], folder: Path) -> str:
    """Its standard output; it must succeed."""
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
