"""A run with adapters, from its first step to a directory for peft and a merged model, in the real recipe."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import HfApi, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp2kit.checkpoint.from_hf import hf_to_dcp
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.checkpoint.merge import merge_to_hf
from fsdp2kit.checkpoint.reader import SafeReader
from fsdp2kit.errors import UserError
from fsdp2kit.parity.reference import worst_relative
from fsdp2kit.torch_compat import SHARDS_INTEGERS
from tests.support.models import demo_model_dir, needs_integers
from tests.support.runs import Run, assert_refused, losses, resume, run_recipe, runner, write_run
from tests.support.workers import WorkerPool
from tools import dcp_to_hf as convert
from tools import generate

DEMO = Path(__file__).parents[2] / "toml" / "demo"
LORA = ("lora.rank=4", "lora.dora=true")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model in bfloat16, with the demo's tokenizer."""
    return demo_model_dir(tmp_path_factory.mktemp("tied"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def toml(model_dir: Path) -> Path:
    return write_run(model_dir, lr=1e-2)


@pytest.fixture(scope="module")
def run(pool: WorkerPool, toml: Path) -> Run:
    return runner(pool, toml)


@pytest.fixture(scope="module")
def straight(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on dp = 2, checkpoints of steps 3 and 6, an export."""
    directory = tmp_path_factory.mktemp("straight") / "run"
    run(directory, 2, *LORA)
    return directory


def other_weights(model_dir: Path, folder: Path) -> Path:
    """A model of the same shapes, with other values."""
    shutil.copytree(model_dir, folder)
    values = load_file(folder / "model.safetensors")
    values["model.norm.weight"] += 1
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_adapter(model_dir: Path, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        return PeftModel.from_pretrained(base, str(adapter)).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(48)[None] * 7 % 1024, use_cache=False).logits


@pytest.mark.full
def test_a_checkpoint_holds_adapters_alone_and_resumes_on_another_mesh(
    straight: Path, run: Run, tmp_path: Path
) -> None:
    checkpoint = straight / "checkpoints" / "step-000003"
    assert "whole: step 3" in verify(checkpoint)
    stored = SafeReader(checkpoint).stored_tensors()
    assert all(".lora_" in key for key in stored)
    numbers = sum(tensor.size.numel() for key, tensor in stored.items() if key.startswith("model."))
    assert sum(tensor.size.numel() for tensor in stored.values()) <= 3 * numbers + len(stored), "moments, step counts"
    assert losses(straight)[-1] < losses(straight)[0] - 0.1
    for size, mesh in ((4, ("mesh.cp=2", "fsdp.strategy=no_shard")), (1, ())):
        resumed = resume(run, checkpoint, tmp_path / f"{size}", size, *LORA, *mesh)
        assert worst_relative([line["loss"] for line in resumed], losses(straight)[3:]) < 1e-5


def test_the_export_is_what_peft_loads(straight: Path, model_dir: Path) -> None:
    out = straight / "hf"
    assert {path.name for path in out.iterdir()} == {
        ".fsdp2kit-export.json", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model_dir)
    exported = with_adapter(model_dir, out)
    # The same adapter, whose values come straight from the checkpoint.
    direct = with_adapter(model_dir, out)
    state = {name: p.detach() for name, p in direct.get_base_model().named_parameters() if "lora_" in name}
    for tensor in state.values():
        tensor.fill_(float("nan"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({"model": state}, checkpoint_id=straight / "checkpoints" / "step-000006", no_dist=True)
    assert torch.equal(logits(exported), logits(direct))
    assert not torch.allclose(logits(exported), logits(AutoModelForCausalLM.from_pretrained(model_dir).float()))


def run_uploading(toml: str, overrides: Sequence[str]) -> list[tuple[str, set[str]]]:
    """What a run uploads to the hub: repositories, and the files in them."""
    uploaded = []

    def upload(_: Any, *, repo_id: str, folder_path: Path, ignore_patterns: list[str]) -> None:
        names = {path.name for path in folder_path.iterdir()}
        uploaded.append((repo_id, set(filter_repo_objects(names, ignore_patterns=ignore_patterns))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfApi, "create_repo", lambda _, name, **options: RepoUrl(f"https://huggingface.co/{name}"))
        patch.setattr(HfApi, "upload_folder", upload)
        assert not run_recipe(toml, overrides).startswith("error")
    return uploaded


@pytest.mark.full
def test_the_best_adapter_is_exported_and_uploaded(
    toml: Path, model_dir: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    evaluation = [f"eval.path='{DEMO / 'heldout.jsonl'}'", "eval.every=1", "eval.keep_best=true"]
    # No later one is so much better than the first.
    best = ["eval.min_delta=5.0", "checkpoint.every=0", "checkpoint.export=best"]
    hub = [f"run.dir='{tmp_path / 'run'}'", "checkpoint.push_to_hub=me/mine"]
    uploads = pool.run(2, run_uploading, str(toml), [*LORA, *evaluation, *best, *hub])
    kept = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["step-000001", "step-000006"]
    dcp_to_hf(kept / "step-000001", tmp_path / "best")
    found, expected = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "run/hf", tmp_path / "best")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    with_adapter(model_dir, tmp_path / "run" / "hf")
    adapter = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "generation_config.json"}
    assert uploads == [[("me/mine", adapter | {"tokenizer.json", "tokenizer_config.json"})], []], "rank 0 alone, once"


def test_it_merges_into_the_model_a_tensor_at_a_time(
    straight: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = straight / "checkpoints" / "step-000006"
    assert convert.main([str(checkpoint), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'merged'}: written in float32, as asked for\n"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    peft = with_adapter(model_dir, straight / "hf")
    apart = logits(peft)
    theirs = peft.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in merged.state_dict().items())
    assert torch.allclose(logits(merged), apart, rtol=1e-4, atol=1e-4)

    said = merge_to_hf(checkpoint, tmp_path / "default")
    assert said == "bfloat16, which the config of the model that the adapter was trained on names"
    found = load_file(tmp_path / "default" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}, "the source's"
    assert all(torch.equal(tensor, theirs[name].bfloat16()) for name, tensor in found.items())

    unnamed = shutil.copytree(checkpoint / "hf", tmp_path / "unnamed")
    fields = json.loads((unnamed / "config.json").read_text())
    del fields["dtype"]
    (unnamed / "config.json").write_text(json.dumps(fields))
    said = merge_to_hf(checkpoint, tmp_path / "again", config_dir=unnamed)
    assert said == f"bfloat16, in which {model_dir} has most weights"

    other = other_weights(model_dir, tmp_path / "other")
    for arguments, says in (
        (["--merge", str(other)], "holds other weights than the adapter was trained on"),
        (["--verify"], "this one holds an adapter"),
    ):
        assert convert.main([str(checkpoint), str(tmp_path / "x"), *arguments]) == 2
        assert says in capsys.readouterr().err
    hf_to_dcp(tmp_path / "merged", tmp_path / "dcp")
    with pytest.raises(UserError, match="holds a whole model, and no adapter"):
        merge_to_hf(tmp_path / "dcp", tmp_path / "x")


@pytest.mark.full
@needs_integers
def test_a_base_in_4_bits_resumes_on_another_mesh_and_merges_into_its_own_weights(
    run: Run, straight: Path, model_dir: Path, tmp_path: Path
) -> None:
    quantized = (*LORA, "lora.quantize=nf4")
    whole = tmp_path / "run"
    run(whole, 2, *quantized)
    assert abs(losses(whole)[0] / losses(straight)[0] - 1) > 1e-4, "it is another model"
    assert losses(whole)[-1] < losses(whole)[0] - 0.1
    checkpoint = whole / "checkpoints" / "step-000003"
    assert all(".lora_" in key for key in SafeReader(checkpoint).stored_tensors())
    resumed = resume(run, checkpoint, tmp_path / "more", 4, *quantized, "mesh.cp=2", "fsdp.strategy=shard_grad_op")
    assert worst_relative([line["loss"] for line in resumed], losses(whole)[3:]) < 1e-5

    merge_to_hf(whole / "checkpoints" / "step-000006", tmp_path / "merged", dtype="float32")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    theirs = with_adapter(model_dir, whole / "hf").merge_and_unload().state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in merged.items())


@pytest.mark.full
def test_training_goes_on_from_an_adapter(
    straight: Path, run: Run, toml: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    """Its first loss is that of the merged model, trained in full."""
    merge_to_hf(straight / "checkpoints" / "step-000006", tmp_path / "merged", dtype="float32")
    more = ("train.steps=1", "checkpoint.export_hf=never")
    [adapter] = run(tmp_path / "adapter", 2, f"model.adapter={straight / 'hf'}", *more)
    [full] = run(tmp_path / "full", 1, f"model.path={tmp_path / 'merged'}", *more)
    assert adapter["loss"] == pytest.approx(full["loss"], rel=1e-5)
    assert adapter["loss"] < losses(straight)[0] - 0.1
    # One that peft wrote says no more than its model's name.
    other = shutil.copytree(straight / "hf", tmp_path / "other")
    (other / ".fsdp2kit-export.json").unlink()
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "org/another"}))
    [said] = pool.run(1, run_recipe, str(toml), [f"run.dir='{tmp_path / 'warned'}'", f"model.adapter={other}", *more])
    assert f"\nwarning: model.adapter: {other} names org/another as its model" in said


def test_an_adapter_answers(straight: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = "Tell me the month after June."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert generate.main([str(straight / "hf"), question, "--max-new-tokens", "8"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": tokenizer.eos_token_id}
    ids = with_adapter(model_dir, straight / "hf").generate(**inputs, **options)
    answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert capsys.readouterr().out == f"> {question}\n{answer}\n"


@pytest.mark.full
def test_prompts_are_answered_and_dropout_can_be_waived(run: Run, tmp_path: Path) -> None:
    waived = ("lora.dropout=0.1", "preflight.allow=['dropout']")
    prompts = ("eval.prompts=['Hi']", "eval.max_new_tokens=2")
    evaluation = (f"eval.path={DEMO / 'heldout.jsonl'}", "eval.every=1", *prompts)
    run(tmp_path / "run", 2, "lora.rank=2", *waived, *evaluation, "train.steps=1", "mesh.cp=2")
    assert json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])["prompt"] == "Hi"


@pytest.mark.full
def test_mistakes_are_one_line(straight: Path, model_dir: Path, toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    checkpoint = straight / "checkpoints" / "step-000006"
    other = other_weights(model_dir, tmp_path / "other")
    narrow, fewer = tmp_path / "narrow", tmp_path / "fewer"
    for folder in (narrow, fewer):
        shutil.copytree(straight / "hf", folder)
        (folder / ".fsdp2kit-export.json").unlink()
    trained = load_file(narrow / "adapter_model.safetensors")
    name = next(name for name in trained if "lora_A" in name)
    save_file({**trained, name: trained[name][:, 1:].contiguous()}, narrow / "adapter_model.safetensors")
    save_file({key: value for key, value in trained.items() if key != name}, fewer / "adapter_model.safetensors")
    mistakes = {
        ("lora.rank=0",): "lora.rank",
        ("lora.rank=4", "lora.target_modules=['q_prj']"): "did you mean q_proj?",
        ("lora.rank=4", "lora.dropout=0.1"): "lora.dropout: has dropout (lora.dropout)",
        (f"model.adapter={model_dir}",): "is not an adapter's config",
        (f"model.adapter={straight / 'hf'}", f"model.path={other}"): "was trained on another model than model.path is",
        (f"model.path={straight / 'hf'}",): "is an adapter without its model",
        (
            f"model.adapter={straight / 'hf'}",
            f"checkpoint.export_dir={straight / 'hf'}",
        ): "is read here, and the export",
        (f"model.adapter={narrow}",): "has shape [4, 71], and the model wants [4, 72]",
        (f"model.adapter={fewer}",): f"{name} is only in the model",
        (f"model.weights={checkpoint}",): "holds an adapter, and not the model that it belongs to",
        (
            f"run.resume={checkpoint}",
            "lora.rank=8",
        ): "was made with lora.rank = '4', and this run has lora.rank = '8'; "
        "undo that, or choose another run.dir, or go on from its adapter: export it",
        (f"run.resume={checkpoint}", *LORA, "lora.quantize=nf4"): (
            "and this run has lora.quantize = 'nf4'" if SHARDS_INTEGERS else "shards no integers"
        ),
        ("lora.rank=4", "lora.quantize=nf5"): "lora.quantize",
        (f"run.resume={checkpoint}",): "was made with lora.rank = '4', and this run has lora.rank = None",
        (
            f"run.resume={checkpoint}",
            *LORA,
            "lora.target_modules=['q_proj']",
        ): "this run has lora.target_modules = '2 ",
    }
    assert_refused(pool, toml, mistakes, tmp_path, size=1)
