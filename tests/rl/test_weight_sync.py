"""An engine has, after a sync, the very bits that transformers (and peft) would save of the trainer's weights."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.parity.reference import load_plain
from fsdp2kit.rl.weight_sync import _plan
from fsdp2kit.weights.record import weights_of
from tests.rl.helpers.jobs import bits, broken, change, cost, send_and_wait, synced
from tests.support.cases import Case
from tests.support.models import _SIZES, full, slow, tiny_model_dir, write_adapter
from tests.support.workers import FORKS, WorkerPool

HYBRID = (("strategy", "hybrid_shard"),)
KIB = 2**-10
CASES = [
    Case("two_experts", 3, 1),  # uneven shards, and a rank with none
    Case("qwen3", 2, 1, fsdp=(("param_dtype", "bfloat16"),), adapter="saved"),
    Case("qwen3_moe", 1, 2, adapter="dora"),
]
OTHERS = [
    Case("qwen3", 2, 1, fsdp=(("param_dtype", "bfloat16"),), adapter="lora"),
    Case("smollm2", 1, 2),
    Case("llama3", 2, 1, fsdp=(("strategy", "no_shard"), ("unit", "root"))),
    Case("llama3", 2, 1, fsdp=(("ignored_modules", ["model.embed_tokens"]),), frozen=("model.embed_tokens.*",)),
    Case("olmoe", 4, 1, ep=2),
    # What is ignored is whole on every rank, beside an adapter that is sharded.
    Case("qwen3", 2, 1, fsdp=(("ignored_modules", ["*.base_layer"]),), adapter="lora"),
    Case("llama3", 2, 1, fsdp=(("ignored_modules", ["*.0.*.base_layer", "*.v_proj.base_layer"]),), adapter="dora"),
    Case("mixtral", 2, 2),
    Case("cohere", 4, 1, fsdp=HYBRID, dp_replicate=2),
    Case("llama3", 3, 1, adapter="saved"),
    Case("granitemoe", 2, 2, ep=4),
]
SLOW = [
    Case("smollm2", 1, 1),
    Case("llama3", 2, 1),
    Case("qwen3_moe", 4, 1, fsdp=HYBRID, dp_replicate=2, ep=2),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in {case.kind for case in CASES + OTHERS + SLOW} - {"two_experts"}:
        tiny_model_dir(kind, folder)
    for case in CASES + OTHERS + SLOW:
        if case.adapter is not None:
            write_adapter(folder, case.kind, case.adapter)
    config = AutoConfig.for_model(
        "qwen3_moe", **_SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "two_experts")
    return folder


def plain(models: Path, case: Case, out: Path, *, changed: bool = False) -> dict[str, Any]:
    """What transformers saves of the same weights in bfloat16, the adapter merged by peft, and which of it changes."""
    model: Any = load_plain(models / case.kind)
    for pattern in case.frozen:
        model.get_submodule(pattern.removesuffix(".*")).requires_grad_(False)
    if case.adapter is not None:
        if ("param_dtype", "bfloat16") in case.fsdp:  # in which what is frozen is kept
            model.to(torch.bfloat16).float()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(model, str(models / f"{case.kind}-{case.adapter}"), is_trainable=True)
    if changed:
        change(model)
    if case.adapter is not None:
        model = model.merge_and_unload()
    model.to(torch.bfloat16).save_pretrained(out)
    return {name: bits(tensor) for name, tensor in load_file(out / "model.safetensors").items()}


@pytest.mark.parametrize("case", [*CASES, *map(full, OTHERS), *map(slow, SLOW)], ids=str)
def test_an_engine_has_what_an_export_has(case: Case, models: Path, pool: WorkerPool, tmp_path: Path) -> None:
    buckets = (40 * KIB, 1 * KIB, 1, 64)
    ranks = pool.run(case.world, synced, models, case, torch.bfloat16, buckets)
    first = plain(models, case, tmp_path / "first")
    second = plain(models, case, tmp_path / "second", changed=True)
    differ = {name for name in first if not np.array_equal(first[name], second[name])}
    assert differ
    # As it is gathered: the same number of rows from each rank.
    whole = load_plain(models / case.kind).parameters()
    largest = max(2 * case.world * math.ceil(len(p) / case.world) * p[0].numel() for p in whole)
    for *syncs, (again, _) in ranks:
        for (arrays, sizes), mib in zip(syncs, buckets, strict=True):
            assert arrays.keys() == first.keys()
            assert not [name for name in first if not np.array_equal(arrays[name], first[name])]
            assert (len(sizes) == 1) == (mib >= 1)
            assert max(sizes) <= max(mib * 2**20, largest)
        assert differ <= again.keys() <= second.keys()
        assert not [name for name in again if not np.array_equal(again[name], second[name])]
        if case.frozen or case.adapter:
            assert again.keys() < second.keys(), "what is frozen is sent once"


@pytest.mark.parametrize(
    ("kind", "mib"),
    [
        full("mixtral", 1 * KIB),
        full("mixtral", 1),
        full("llama3", 20 * KIB),
        slow("mixtral", 20 * KIB),
        slow("llama3", 1 * KIB),
        slow("llama3", 1),
    ],
)
def test_a_sync_holds_two_buckets_and_sends_the_engines_dtype(
    kind: str, mib: float, models: Path, pool: WorkerPool
) -> None:
    shapes = [tuple(parameter.shape) for parameter in load_plain(models / kind).parameters()]
    largest = max(map(math.prod, shapes))
    costs = pool.run(2, cost, models, Case(kind, 2, 1), [torch.bfloat16, torch.float32], mib)
    for narrow, wide in costs:
        for (peak, _, _), itemsize in ((narrow, 2), (wide, 4)):
            # Fused experts are copied to be taken apart, and a tensor alone in its bucket is never copied otherwise.
            copied = itemsize * largest if kind == "mixtral" and itemsize * largest > 2 * mib * 2**20 else 0
            little = 1000  # what ranks tell each other
            assert peak <= 2 * mib * 2**20 + itemsize * largest + copied + little
            pieces = itemsize * largest if kind == "mixtral" else 0
            whole = itemsize * sum(map(math.prod, shapes))
            assert peak <= 2 * whole + pieces + little, "as it was gathered, in order, and taken apart"
        # All sizes here are even, and nothing else depends on the dtype.
        assert wide[1] - narrow[1] == 2 * sum(map(math.prod, shapes)) // 2
        assert narrow[1] < 2 * sum(map(math.prod, shapes)) // 2 + 20_000, "what ranks tell each other is little"
        if mib >= 1:
            assert narrow[2] == wide[2], "one gather, whatever the number of tensors"


def test_a_tensor_that_the_class_alone_lacks_has_the_engines_dtype(models: Path) -> None:
    """As in an export: a buffer that was registered later, for one."""
    model: Any = load_plain(models / "llama3")
    weights_of(model).asked_dtypes[torch.bfloat16] = {}
    sent = [form.dtype for entry in _plan(model, torch.bfloat16) for form in entry.sources.values()]
    assert set(sent) == {torch.bfloat16}


def test_an_update_that_breaks_off_is_not_served_and_sent_again_whole(
    models: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    case = Case("llama3", 2, 1, frozen=("model.embed_tokens.*",))
    for rank, (raised, version, refusal, stale, again) in enumerate(pool.run(2, broken, models, case)):
        assert raised == (
            "OSError: the server is gone" if rank else "RunFailure: rank 1 failed: OSError: the server is gone"
        )
        assert version is None
        assert refusal.startswith("engine: has a part of the weights of version 2, for the update broke off")
        assert stale.startswith("engine: has weights of version 3, and version 4 is wanted")
        want = plain(models, case, tmp_path / f"rank{rank}", changed=True)
        assert again.keys() == want.keys()
        assert all(np.array_equal(again[name], want[name]) for name in want)


def test_another_process_reads_buckets_from_memory_that_is_gone_with_the_sender() -> None:
    before = set(Path("/dev/shm").iterdir())
    ours, theirs = FORKS.Pipe()
    sender = FORKS.Process(target=send_and_wait, args=(theirs,), daemon=True)
    sender.start()
    expected = {
        "matrix": torch.arange(6).view(2, 3).bfloat16(),
        "scale": torch.tensor([0.5]),
        "count": torch.tensor(7),
    }
    for version in (1, 2):
        path = ours.recv()
        found = load_file(path)
        assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in expected.items()}
        assert all(torch.equal(tensor, expected[name] * version) for name, tensor in found.items())
        assert Path(path).exists()
        if version == 1:
            ours.send(None)
            assert ours.recv() == (1, False), "its version, and whether the file is still open"
    sender.kill()
    sender.join()
    assert not Path(path).exists()
    assert set(Path("/dev/shm").iterdir()) <= before
    assert torch.equal(found["matrix"], 2 * expected["matrix"]), "who reads it still has it"
