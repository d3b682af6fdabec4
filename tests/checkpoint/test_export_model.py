"""A sharded model to a Hugging Face directory, against plain transformers' and peft's `save_pretrained`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fsdp2kit.checkpoint import export_model as module
from fsdp2kit.checkpoint.export_model import export_model
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.parity.reference import load_plain
from tests.checkpoint.helpers import assert_equal, exported
from tests.rl.helpers.jobs import Held, change
from tests.support.cases import Case, build
from tests.support.models import DEMO, demo_model_dir, full, tiny_model_dir, write_adapter
from tests.support.workers import WorkerPool

HYBRID = (("strategy", "hybrid_shard"),)
IGNORED = (("ignored_modules", ["model.embed_tokens"]),)
CASES = [
    Case("smollm2", 1),
    Case("llama3", 3, fsdp=(("param_dtype", "bfloat16"),)),
    Case("qwen3_moe", 1, 2),
]
MORE = [
    Case("mixtral", 2, 1),
    Case("llama3", 2, fsdp=IGNORED, frozen=("model.embed_tokens.*",)),
    Case("cohere", 4, fsdp=HYBRID, dp_replicate=2),
    Case("smollm2", 2, fsdp=(("strategy", "no_shard"),)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in {case.kind for case in (*CASES, *MORE)}:
        tiny_model_dir(kind, folder)
        GenerationConfig(max_new_tokens=7, eos_token_id=[3, 4]).save_pretrained(folder / kind)
    write_adapter(folder, "llama3", "dora")
    return folder


def export(folder: Path, case: Case, out: Path, **options: Any) -> None:
    """Change a model as training does, and export it twice: an export is replaced."""
    model = build(case.config(folder, steps=1, rows=4)).model
    if case.cp == 1:
        model(input_ids=torch.arange(8)[None], use_cache=False)  # which leaves units gathered
    export_model(model, str(out), dtype="float32")
    change(model)
    export_model(model, out, **options)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=str)
def test_a_sharded_model_is_written_as_transformers_writes_it(
    case: Case, models: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    pool.run(case.world, export, models, case, out, dtype="bfloat16", max_shard_bytes=20_000)
    plain: Any = load_plain(models / case.kind)
    for pattern in case.frozen:
        plain.get_submodule(pattern.removesuffix(".*")).requires_grad_(False)
    change(plain)
    plain.to(torch.bfloat16).save_pretrained(reference)
    assert_equal(exported(out), exported(reference))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {path.name for path in out.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) > case.world, "every rank wrote files, some more than one"
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, reference))
    assert ours == theirs
    assert GenerationConfig.from_pretrained(out).eos_token_id == [3, 4]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not any(info.values())
    expected = AutoModelForCausalLM.from_pretrained(reference, dtype="auto")
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, expected(ids).logits)


def test_an_adapter_is_written_as_peft_writes_it(models: Path, pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, export, models, Case("llama3", 2, adapter="dora"), tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: Any = PeftModel.from_pretrained(
            load_plain(models / "llama3"), str(models / "llama3-dora"), is_trainable=True
        )
        change(plain)
        plain.save_pretrained(tmp_path / "reference")
        loaded: Any = PeftModel.from_pretrained(load_plain(models / "llama3"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert_equal(exported(tmp_path / "out"), exported(tmp_path / "reference"))
    assert not (tmp_path / "out" / "config.json").exists()
    ids = torch.arange(12)[None]
    torch.testing.assert_close(loaded(ids).logits, plain(ids).logits)


class Memory(Held):
    """Counts a sharded tensor's own shard alone, which is seen by itself."""

    def _see(self, tensor: torch.Tensor) -> Any:
        return super()._see(torch.empty(0) if isinstance(tensor, DTensor) else tensor)


def peak(folder: Path, case: Case, out: Path) -> int:
    """The most bytes that an export holds beside the model."""
    model = build(case.config(folder, steps=1, rows=4)).model
    found = []
    for _ in range(3):  # gloo's own thread lets go of a tensor a moment after its work was waited for
        with Memory() as memory:
            memory.mark([*model.parameters(), *model.buffers()], "model")
            memory.start()
            export_model(model, out, max_shard_bytes=40_000)
            found.append(sum(size for allocation, size in memory.peak() if allocation.category != "model"))
    return min(found)


def test_a_rank_holds_a_few_tensors_and_not_the_model(models: Path, pool: WorkerPool, tmp_path: Path) -> None:
    sizes = [parameter.nbytes for parameter in load_plain(models / "llama3").parameters()]
    for most in pool.run(2, peak, models, Case("llama3", 2), tmp_path / "out"):
        assert most <= 4 * max(sizes) + 1000
    assert sum(sizes) > 8 * max(sizes), "else this would show nothing"


def export_with_tokenizer(folder: Path, out: Path) -> None:
    case = Case(folder.name, 2)
    config = case.config(folder.parent, steps=1, rows=4)
    section = config.model.model_copy(update={"chat_template": "chatml"})
    model = build(config.model_copy(update={"model": section})).model
    export_model(model, out, tokenizer=build_tokenizer(section))


def test_tokenizer_template_and_the_end_of_a_turn_travel_along(pool: WorkerPool, tmp_path: Path) -> None:
    folder = demo_model_dir(tmp_path / "demo", dtype=torch.bfloat16)
    pool.run(2, export_with_tokenizer, folder, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template != AutoTokenizer.from_pretrained(DEMO / "tokenizer").chat_template
    ends = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in (ends if isinstance(ends, list) else [ends])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16, "that of the model it was built from"
    assert model.config.vocab_size >= len(tokenizer)


def refused(folder: Path, case: Case, out: Path) -> list[str]:
    """Each refusal has its message: foreign files, the model's own source, a dtype, `save_pretrained`."""
    model = build(case.config(folder, steps=1, rows=4)).model
    lines = []
    for call in (
        lambda: export_model(model, out),
        lambda: export_model(model, folder / case.kind),
        lambda: export_model(model, out / "new", dtype="int8"),
        lambda: model.save_pretrained(out / "new"),
    ):
        with pytest.raises(UserError) as caught:
            call()
        lines.append(str(caught.value))
    return lines


def test_what_is_not_an_export_is_left_alone(models: Path, pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for lines in pool.run(2, refused, models, Case("llama3", 2), tmp_path):
        taken, source, dtype, theirs = lines
        assert "holds thesis.txt, which no export of fsdp2kit wrote there" in taken
        assert "is read here, and the export would replace it" in source
        assert "'int8' is not a dtype for exports" in dtype
        assert "the model is sharded" in theirs
        assert "export_model(model, directory)" in theirs
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def too_large_for_float16(folder: Path, case: Case, out: Path) -> str:
    model = build(case.config(folder, steps=1, rows=4)).model
    with torch.no_grad():
        model.get_submodule("model.norm").get_parameter("weight").fill_(1e6)
    with pytest.raises(UserError) as caught:
        export_model(model, out, dtype="float16")
    return str(caught.value)


def test_what_float16_does_not_hold_is_refused(models: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """The writer looks at the values, so shards must reach it in their own dtype: cast, they would be infinite."""
    for line in pool.run(2, too_large_for_float16, models, Case("llama3", 2), tmp_path / "out"):
        assert "model.norm.weight has values that float16 does not hold (the largest is 1e+06)" in line
    assert list(tmp_path.iterdir()) == []


def fail_on_one_rank(folder: Path, case: Case, out: Path, what: str) -> str:
    from fsdp2kit.job.distributed import rank

    def write(path: Path, *arguments: Any, **options: Any) -> None:
        if rank() == 1:
            raise OSError(28, "No space left on device")
        return written(path, *arguments, **options)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if rank() == 1 and tensor.is_floating_point():
            raise RuntimeError("can't allocate memory")
        return copied(tensor)

    model = build(case.config(folder, steps=1, rows=4)).model
    written, copied = module.write_safetensors, torch.Tensor.cpu
    with pytest.MonkeyPatch.context() as patch:
        if what == "disk":
            patch.setattr(module, "write_safetensors", write)
        else:
            patch.setattr(torch.Tensor, "cpu", copy)
        with pytest.raises((OSError, RuntimeError)) as caught:
            export_model(model, out, max_shard_bytes=20_000)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"), [("disk", "No space left on device"), full("memory", "can't allocate memory")]
)
def test_what_fails_on_one_rank_ends_all_and_leaves_nothing(
    models: Path, pool: WorkerPool, tmp_path: Path, what: str, message: str
) -> None:
    for line in pool.run(3, fail_on_one_rank, models, Case("llama3", 3), tmp_path / "out", what):
        assert message in line
    assert list(tmp_path.iterdir()) == []
