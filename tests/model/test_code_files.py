"""The code that a model's files name is found with all its relative imports, and travels with exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.model.assets import copy_assets, find_hf_dir, save_assets
from fsdp2kit.model.build import build_model, model_on_meta
from fsdp2kit.model.code_files import code_files
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.weights.record import source_of, weights_of
from tests.data.helpers.templates import CHATML, make_tokenizer
from tests.support.models import tiny_model_dir
from tests.support.parts import write_whole
from tests.support.runs import run_recipe
from tests.support.workers import WorkerPool
from tools import dcp_to_hf, generate, hf_to_dcp

FILES = {
    "modeling_my.py": """
        from transformers import LlamaForCausalLM
        from .configuration_my import MyConfig
        from . import extra, helper as _h
        from .package import Norm
        import os, json
        def late():
            from .late import x
        class MyForCausalLM(LlamaForCausalLM):
            config_class = MyConfig
        """,
    "configuration_my.py": """
        if True:
            try:
                from .constants import (A,
                    B)
            except ImportError:
                X = '\\d'
        """,
    "constants.py": "from .modeling_my import late",  # a circle
    "extra.py": "from .package.deep.inner import *",
    "helper.py": "print('never run', file=open('RAN', 'w'))",
    "late.py": "from .broken import y",
    "broken.py": "def (",
    "package/__init__.py": "from .norm import Norm",
    "package/norm.py": "from ..up import z\nfrom ...beyond import nothing",
    "package/deep/__init__.py": "",
    "package/deep/inner.py": "from ... import top",
    "up.py": "",
    "top.py": "",
    "tokenization_my.py": "from .words import w",
    "words.py": "",
    "pipeline.py": "",
    "custom_generate/generate.py": "from .sample import s",
    "custom_generate/sample.py": "",
}
UNNAMED = {"train.py": "", "secrets/keys.py": "", "package/unused.py": "", "__init__.py": ""}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
        (folder / name).write_text("\n".join(line[indent:] for line in lines) + "\n")
    return folder


def test_code_is_found_with_its_imports_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "model", {**FILES, **UNNAMED})
    config = {
        "auto_map": {"AutoConfig": "configuration_my.MyConfig", "AutoModel": "modeling_my.My"},
        "custom_pipelines": {"mine": {"impl": "pipeline.Mine"}},
    }
    (source / "config.json").write_text(json.dumps(config))
    names = {"auto_map": {"AutoTokenizer": [None, "tokenization_my.Words"], "AutoProcessor": "there/repo--p.P"}}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    monkeypatch.chdir(tmp_path)
    found, missing = code_files(source)
    assert {str(path) for path in found} == FILES.keys()
    assert missing == []
    assert {str(path) for path in code_files(source, ("tokenizer_config.json",))[0]} == {
        "tokenization_my.py", "words.py"
    }  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    copy_assets(source, out)
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in FILES)
    assert not (out / "secrets").exists()
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize(
    ("auto_map", "missing"),
    [
        ({"AutoModel": "other/repo--modeling.M"}, []),
        ({"AutoModel": "../outside.M"}, []),
        ({"AutoModel": "/outside.M"}, []),
        ({"AutoModel": "M"}, []),
        ({"AutoModel": 3, "AutoConfig": None}, []),
        (["gone.A", None], ["gone.py"]),
        ({"AutoModel": "here.M"}, ["lacking.py"]),
        (7, []),
    ],
)
def test_what_is_no_module_of_the_directory(auto_map: Any, missing: list[str], tmp_path: Path) -> None:
    write(tmp_path, {"outside.py": "", "model/here.py": "from .lacking import x"})
    (tmp_path / "model" / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    found, lacking = code_files(tmp_path / "model")
    assert {str(path) for path in found} <= {"here.py"}
    assert [str(path) for path in lacking] == missing


# With a run

_CODE = {
    "configuration_my.py": """
        from transformers import LlamaConfig
        class MyConfig(LlamaConfig):
            model_type = "my_llama"
        """,
    "modeling_my.py": """
        from transformers import LlamaForCausalLM
        from .layers_my import SCALE
        from .configuration_my import MyConfig
        class MyForCausalLM(LlamaForCausalLM):
            config_class = MyConfig
            def forward(self, *args, **kwargs):
                found = super().forward(*args, **kwargs)
                found.logits = found.logits * SCALE
                return found
        """,
    "layers_my.py": "from .numbers_my import SCALE",
    "numbers_my.py": "SCALE = 3.0",
    "tokenization_my.py": """
        from transformers import PreTrainedTokenizerFast
        from .words_my import PREFIX
        class MyTokenizer(PreTrainedTokenizerFast):
            def _encode_plus(self, text, *args, **kwargs):
                text = PREFIX + text if isinstance(text, str) else text
                return super()._encode_plus(text, *args, **kwargs)
        """,
    "words_my.py": 'PREFIX = "x"',
}


def write_coded(folder: Path) -> Path:
    """A model and a tokenizer with code of their own."""
    path = tiny_model_dir("smollm2", folder, vocab_size=512)
    make_tokenizer(CHATML).save_pretrained(path)
    write(path, _CODE)
    for name, changes in {
        "config.json": {
            "model_type": "my_llama",
            "architectures": ["MyForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_my.MyConfig",
                "AutoModelForCausalLM": "modeling_my.MyForCausalLM",
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "MyTokenizer",
            "auto_map": {"AutoTokenizer": [None, "tokenization_my.MyTokenizer"]},
        },
    }.items():
        fields = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**fields, **changes}))
    return path


def check_loads(path: Path, source: Path) -> None:
    """A directory gives the source's logits and tokens, with code from itself alone."""
    ids, found = torch.arange(40)[None], []
    for one in (path, source):
        model: Any = AutoModelForCausalLM.from_pretrained(one, trust_remote_code=True, dtype=torch.float32).eval()
        words = AutoTokenizer.from_pretrained(one, trust_remote_code=True)
        found.append((model(ids).logits, words("Is water wet?").input_ids))
        assert type(model).__name__ == "MyForCausalLM"
        assert type(words).__name__ == "MyTokenizer"
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][1] != make_tokenizer(CHATML)("Is water wet?").input_ids


def train_coded(pool: WorkerPool, tmp_path: Path, source: Path, *overrides: str) -> Path:
    """The last checkpoint of a run of a model with code of its own."""
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(
        f"""
        recipe = "sft"
        model = {{ path = "{source}", trust_remote_code = true, loss_kernel = "chunked" }}
        data = {{ path = "{tmp_path / "rows.jsonl"}", seq_len = 64 }}
        train = {{ steps = 1, global_batch_size = 1 }}
        optimizer.lr = 0.0
        fsdp.param_dtype = "float32"
        run.dir = "{tmp_path / "run"}"
        wandb.mode = "disabled"
        """
    )
    said = pool.run(1, run_recipe, str(tmp_path / "run.toml"), list(overrides))[0]
    assert "exported step-000001" in said, said
    return tmp_path / "run" / "checkpoints" / "step-000001"


TRUST = "--trust-remote-code"


def test_code_of_a_processor_alone_does_not_make_the_model_another(tmp_path: Path) -> None:
    source = write_whole("gemma3", tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoProcessor": "processor.P"}}))
    model, trusted = (model_on_meta(source, trust_remote_code=trusts) for trusts in (False, True))
    assert model is not None
    assert trusted is not None
    assert list(trusted.state_dict()) == list(model.state_dict())
    assert weights_of(trusted).names.whole is not None


def test_a_run_exports_and_converts_the_code_of_its_model(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_coded(tmp_path)
    checkpoint = train_coded(pool, tmp_path, source)
    out = tmp_path / "run" / "hf"
    moved = shutil.move(source, tmp_path / "moved")  # a conversion made elsewhere does not find the source
    assert dcp_to_hf.main([str(checkpoint), str(tmp_path / "converted")]) == 0
    for path in (out, tmp_path / "converted"):
        for name in (*_CODE, "tokenizer.json", "tokenizer_config.json", "config.json"):
            assert (path / name).read_bytes() == (Path(moved) / name).read_bytes(), name
    check_loads(tmp_path / "converted", Path(moved))
    assert generate.main([str(out), "Is water wet?"]) == 2
    assert "contains custom code" in (said := capsys.readouterr().err)
    assert said.endswith("; read that code, and if you trust it give --trust-remote-code\n")
    assert generate.main([str(out), "Is water wet?", TRUST, "--max-new-tokens", "2"]) == 0
    again, back = str(tmp_path / "again"), str(tmp_path / "back")
    assert dcp_to_hf.main([str(checkpoint), again, "--verify", TRUST]) == 0
    assert hf_to_dcp.main([again, back]) == 2
    assert hf_to_dcp.main([again, back, "--verify", TRUST]) == 0
    assert capsys.readouterr().out.count("gives the same logits") == 2


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads every attribute of the model
def test_an_adapter_is_merged_into_a_model_with_code_of_its_own(pool: WorkerPool, tmp_path: Path) -> None:
    source = write_coded(tmp_path)
    checkpoint = train_coded(pool, tmp_path, source, "lora.rank=2", "optimizer.lr=0.01")
    merged = str(tmp_path / "merged")
    assert dcp_to_hf.main([str(checkpoint), merged, "--merge"]) == 2
    assert dcp_to_hf.main([str(checkpoint), merged, "--merge", TRUST, "--dtype", "float32"]) == 0
    ids = torch.arange(40)[None]
    trust: Any = {"trust_remote_code": True, "dtype": torch.float32}
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source, **trust), tmp_path / "run" / "hf")
    ours: Any = AutoModelForCausalLM.from_pretrained(merged, **trust)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
    assert generate.main([str(tmp_path / "run" / "hf"), "Is water wet?", TRUST, "--max-new-tokens", "2"]) == 0


def test_a_checkpoint_without_its_code_is_converted_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As checkpoints were saved that hold a config alone."""
    from tests.checkpoint import helpers

    def write_config(folder: Path) -> None:
        config = helpers.tiny_llama().config
        config.auto_map = {"AutoModelForCausalLM": "modeling_my.MyForCausalLM"}
        config.save_pretrained(folder)

    path = helpers.checkpoints_of(tmp_path / "run", write_assets=write_config).save(helpers.progress_at(3))
    assert dcp_to_hf.main([str(path), str(tmp_path / "out")]) == 0
    assert f"warning: {tmp_path / 'out'}: its files name modeling_my.py, which {path} lacks; give" in (
        capsys.readouterr().out
    )


def test_code_of_a_hub_id_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's client lays it out: links into a store of blobs."""
    source = write_coded(tmp_path)
    (source / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text() + "\n")
    cache = tmp_path / "cache" / "models--some--model"
    snapshot = cache / "snapshots" / "0123456789012345678901234567890123456789"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(snapshot.name)
    for path in source.iterdir():
        shutil.copy(path, cache / "blobs" / path.name)
        (snapshot / path.name).symlink_to(cache / "blobs" / path.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    found = find_hf_dir("some/model", key="model.path", with_weights=True)
    assert found == snapshot
    section = ModelConfig(path=str(snapshot), trust_remote_code=True)
    model, words = build_model(section), build_tokenizer(section)
    words.name_or_path = "some/model"
    out = tmp_path / "out"
    out.mkdir()
    options: dict[str, Any] = {"config": source_of(model).config, "tokenizer": words, "source": found}
    assert save_assets(out, architecture="MyForCausalLM", **options) == []
    for name in (*_CODE, "tokenizer_config.json", "config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
        assert not (out / name).is_symlink()
