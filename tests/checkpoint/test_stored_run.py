"""The format on disk stays: a stored run (two ranks, commit b2be08b) is verified, resumed, started from and exported.

``fixtures/run-of-format-1.tar.gz`` holds its TOML, its metrics, the checkpoints of steps 2 and 4, and the export.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.checkpoint.__main__ import main
from fsdp2kit.checkpoint.hf import dcp_to_hf, ensure_export
from fsdp2kit.checkpoint.state import load_weights
from fsdp2kit.model.assets import config_digest
from tests.support.runs import runner
from tests.support.workers import WorkerPool

FIXTURE = Path(__file__).parent / "fixtures" / "run-of-format-1.tar.gz"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(tmp_path / "old")
    return tmp_path / "old"


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def test_it_is_verified(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4):
        assert main(["verify", str(checkpoint(old, step))]) == 0
        assert f"whole: step {step}, 6 files" in capsys.readouterr().out


def test_it_is_exported_to_the_same_files_and_its_export_is_known(old: Path, tmp_path: Path) -> None:
    dcp_to_hf(checkpoint(old, 4), tmp_path / "out")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (old / "hf" / name).read_bytes()
    assert not ensure_export(checkpoint(old, 4), out=old / "hf", dtype="float32")
    assert ensure_export(checkpoint(old, 2), out=old / "hf", dtype="float32")


def test_its_weights_start_another_run(old: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(old / "hf"))
    load_weights(checkpoint(old, 4), model)
    exported = load_file(old / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], parameter) for name, parameter in model.named_parameters())


def test_it_is_resumed_and_ends_as_it_did(pool: WorkerPool, old: Path) -> None:
    expected = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    digest = config_digest(AutoConfig.from_pretrained(old / "hf"))  # depends on transformers' version
    for path in (old / "checkpoints").glob("step-*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["identity"]["model"] = digest
        path.write_text(json.dumps(manifest))
    checkpoint(old, 4).rename(old / "of step 4")
    found = runner(pool, old / "run.toml")(old, 2)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens_total"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key
    assert main(["verify", str(checkpoint(old, 4))]) == 0
