"""State dicts of FSDP1 and of plain torch to checkpoints that a run can start from, against plain transformers."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.checkpoint.state import load_weights
from fsdp2kit.errors import UserError
from fsdp2kit.migrate.state_dicts import torch_to_dcp
from tests.checkpoint import helpers
from tests.checkpoint.helpers import tool
from tests.support.models import full
from tests.support.workers import WorkerPool

IDS = torch.arange(24)[None] * 7 % helpers.VOCAB


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def save_as_fsdp1(folder: Path, *, use_orig_params: bool, tied: bool) -> None:
    """What a user of FSDP1 has: a full state dict beside the model's config, and a sharded one without."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so in many ways
        model = FSDP(
            helpers.tiny_llama(seed=5, tied=tied),
            auto_wrap_policy=policy,
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full, moments = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            dcp.save({"model": model.state_dict(), "epoch": 1}, checkpoint_id=folder / "sharded" / "dcp")
            dcp.save(model.state_dict(), checkpoint_id=folder / "sharded" / "bare")
    if dist.get_rank() == 0:
        (folder / "full").mkdir()
        torch.save(full, folder / "full" / "bare.pt")
        torch.save({"model": full, "optimizer": moments, "epoch": 1}, folder / "full" / "nested.pt")
        plain = helpers.tiny_llama(seed=5, tied=tied)
        plain.load_state_dict(full)
        plain.save_pretrained(folder / "hf")
        helpers.write_assets(folder / "hf")
        plain.config.save_pretrained(folder / "hf")
        plain.config.save_pretrained(folder / "full")


@pytest.mark.parametrize(("use_orig_params", "tied"), [full(True, True), (False, False)])
def test_fsdp1_checkpoints_are_taken_over(pool: WorkerPool, tmp_path: Path, use_orig_params: bool, tied: bool) -> None:
    pool.run(2, save_as_fsdp1, tmp_path, use_orig_params=use_orig_params, tied=tied)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))
    assert not torch.equal(expected, logits_of(helpers.tiny_llama(seed=5, tied=tied)))
    for source in ("full/bare.pt", "full/nested.pt", "sharded/dcp", "sharded/bare"):
        out = tmp_path / "out" / source
        arguments = [str(tmp_path / source), str(out)]
        if source.startswith("sharded"):
            assert tool("hf_to_dcp").main(arguments) == 2  # there is no config
            arguments += ["--config", str(tmp_path / "hf")]
        assert tool("hf_to_dcp").main(arguments) == 0
        assert "whole: step 0" in verify(out)
        started = helpers.tiny_llama(seed=1, tied=tied)
        load_weights(out, started)
        assert torch.equal(logits_of(started), expected), source
        dcp_to_hf(out, tmp_path / "back" / source)
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "back" / source)), expected)
        assert (out / "hf" / "tokenizer.json").is_file() == source.startswith("sharded")


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    helpers.tiny_llama().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"_forward_module._fsdp_wrapped_module.{name}",
        lambda name: f"module._orig_mod.{name}".replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
        lambda name: name,
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_names_are_found_under_wrappers_and_prefixes(tmp_path: Path, hf_dir: Path, rename: Any, is_file: bool) -> None:
    model, source = helpers.tiny_llama(seed=3).bfloat16(), tmp_path / "source"
    state = {rename(name): tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    state |= {rename("model.layers.0.self_attn.rotary_emb.inv_freq"): torch.ones(4)}
    state |= {f"optim.state.{name}.exp_avg": tensor for name, tensor in model.named_parameters()}
    torch.save(state, source) if is_file else dcp.save(state, checkpoint_id=source, no_dist=True)
    torch_to_dcp(source, tmp_path / "out", config_dir=hf_dir)
    dcp_to_hf(tmp_path / "out", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in expected)


class _Anything:
    """Not a tensor: `torch.load` with ``weights_only`` refuses it."""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model": {"x": torch.ones(1)}}, r"has no tensor .*embed_tokens"),
        ({"lm_head.weight": torch.ones(1), "model._flat_param": torch.ones(1)}, "piece of many parameters"),
        ([torch.ones(1)], "holds a list and no state dict"),
        ({"arguments": _Anything()}, "cannot be read as a state dict of tensors"),
        (b"damaged", "cannot be read as a state dict of tensors"),
    ],
)
def test_what_is_no_state_dict_of_the_model_is_refused(tmp_path: Path, hf_dir: Path, content: Any, says: str) -> None:
    source = tmp_path / "source.pt"
    source.write_bytes(content) if isinstance(content, bytes) else torch.save(content, source)
    with pytest.raises(UserError, match=says):
        torch_to_dcp(source, tmp_path / "out", config_dir=hf_dir)
    assert not (tmp_path / "out").exists()


def test_a_state_dict_of_another_shape_is_refused(tmp_path: Path, hf_dir: Path) -> None:
    torch.save(helpers.tiny_llama(hidden=8).state_dict(), tmp_path / "source.pt")
    with pytest.raises(UserError, match=r"has shape \(97, 8\) in the checkpoint and \(97, 16\)"):
        torch_to_dcp(tmp_path / "source.pt", tmp_path / "out", config_dir=hf_dir)


@pytest.mark.parametrize("options", [[], ["--verify"], ["--config", "hf"]])
def test_a_source_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list
) -> None:
    for source, says in (
        (tmp_path / "no.pt", "does not exist"),
        (tmp_path, "holds neither config.json nor .metadata"),
    ):
        assert tool("hf_to_dcp").main([str(source), str(tmp_path / "out"), *options]) == 2
        assert capsys.readouterr().err.startswith(f"error: {source}: {says}; give a Hugging Face directory, ")


def test_options_that_do_not_fit_the_source_are_refused(
    tmp_path: Path, hf_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({}, tmp_path / "source.pt")
    assert tool("hf_to_dcp").main([str(tmp_path / "source.pt"), str(tmp_path / "out"), "--verify"]) == 2
    assert "--verify" in capsys.readouterr().err
    assert tool("hf_to_dcp").main([str(hf_dir), str(tmp_path / "out"), "--config", str(hf_dir)]) == 2
    assert "--config" in capsys.readouterr().err
