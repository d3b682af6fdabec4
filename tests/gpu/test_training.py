"""Training on one CUDA device: against plain transformers, with shards on the host, without needless waits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.data.loader import Batch
from fsdp2kit.job.distributed import World, local_part
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.parallel.context_parallel.batch import build_slice_batch
from fsdp2kit.parallel.context_parallel.layout import AttentionPath
from fsdp2kit.parity.engine import RankBatches, Sharded
from fsdp2kit.parity.reference import errors, plain_loop
from fsdp2kit.rl.sleep import sleep, wake_up
from fsdp2kit.train.step import GlobalBatch, next_batch
from fsdp2kit.train.throughput import PhaseMemory
from tests.parallel.helpers.alone import documents_alone
from tests.support.cases import Case, Recorder, build, run_case, step
from tests.support.host_syncs import count_host_syncs
from tests.support.models import assert_as_exact_as_plain_bfloat16, beyond, make_batches, tiny_model_dir

pytestmark = pytest.mark.gpu

KINDS = ["smollm2", "llama3", "qwen3"]
# Sinks, chunks and layers with a state, each beside experts; a mixture.
FAMILIES = ["gpt_oss", "llama4", "qwen3_5_moe", "nemotron_h", "granitemoehybrid", "deepseek_v3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for kind in [*KINDS, *FAMILIES]:
        tiny_model_dir(kind, path)
    return path


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "ac"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_losses_and_norms_are_those_of_plain_transformers(
    folder: Path, world: World, kind: str, dtype: str, checkpointing: bool
) -> None:
    batches = make_batches()
    case = Case(kind, micro=2, fsdp=(("param_dtype", dtype),), checkpointing=checkpointing)
    plain = partial(plain_loop, folder / kind, batches, lr=case.lr, device=str(world.device))
    exact = plain(micro_batch_size=2)

    found = errors(run_case(folder, case, batches), exact)

    if dtype == "float32":
        assert not beyond(found, errors(plain(micro_batch_size=1), exact))
    else:
        assert_as_exact_as_plain_bfloat16(found, errors(plain(micro_batch_size=2, dtype=torch.bfloat16), exact))


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_of_today_train_as_each_document_alone(folder: Path, world: World, kind: str) -> None:
    case = Case(kind, micro=2, attention="auto", checkpointing="full", lr=3e-4)

    found = run_case(folder, case, make_batches())

    expected, control = documents_alone(folder, device=str(world.device))(case)
    assert not beyond(errors(found, expected), control)


@pytest.mark.parametrize("kind", ["llama3", "gemma3"])
def test_flex_attention_trains_as_plain_transformers(tmp_path: Path, world: World, kind: str) -> None:
    tiny_model_dir(kind, tmp_path, head_dim=16)  # its kernels take no narrower heads
    batches = make_batches()
    case = Case(kind, micro=2, attention="flex_attention", fsdp=(("param_dtype", "float32"),))
    plain = partial(plain_loop, tmp_path / kind, batches, lr=case.lr, device=str(world.device))
    exact = plain(micro_batch_size=2)

    found = errors(run_case(tmp_path, case, batches), exact)

    assert not beyond(found, errors(plain(micro_batch_size=1), exact))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_parameters_train_to_the_same_curves(folder: Path, world: World, dtype: str) -> None:
    case = Case("llama3", micro=2, fsdp=(("param_dtype", dtype),))
    offloaded = replace(case, fsdp=(*case.fsdp, ("offload", "params")))
    batches = make_batches()

    difference = errors(run_case(folder, offloaded, batches), run_case(folder, case, batches))

    # AdamW's kernel on the CPU rounds otherwise than the one on the device.
    assert max(difference.values()) < (1e-4 if dtype == "float32" else 2e-2)


def test_offloaded_shards_gradients_and_moments_live_in_host_memory(folder: Path, world: World) -> None:
    sharded, batch = _ready(folder, ("offload", "params"))
    config, model = sharded.config, sharded.model
    optimizer = build_optimizer(config.optimizer, model)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=5)

    record = step(sharded, optimizer, schedule, batch)

    assert record["loss"] > 0
    assert record["grad_norm"] > 0
    assert all(parameter.to_local().device.type == "cpu" for parameter in model.parameters())
    assert all(parameter.to_local().is_pinned() for parameter in model.parameters())
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.device.type for moment in moments} == {"cpu"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_on_the_host_change_nothing(folder: Path, world: World, dtype: str) -> None:
    case = Case("llama3", micro=2, fsdp=(("param_dtype", dtype),))
    hosted = replace(case, fsdp=(*case.fsdp, ("offload", "optimizer")))
    batches = make_batches()

    assert run_case(folder, hosted, batches).loss == run_case(folder, case, batches).loss


def test_moments_visit_the_device_and_live_on_the_host(folder: Path, world: World) -> None:
    sharded, batch = _ready(folder, ("offload", "optimizer"))
    config, model = sharded.config, sharded.model
    optimizer = build_optimizer(config.optimizer, model, state_on_host=True)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=5)

    step(sharded, optimizer, schedule, batch)

    assert {parameter.to_local().device.type for parameter in model.parameters()} == {"cuda"}
    moments = [state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert all(moment.device.type == "cpu" and moment.is_pinned() for moment in moments)
    assert any(moment.abs().sum() > 0 for moment in moments)


@pytest.mark.parametrize("kept", ["selective", "offload"])
def test_ways_of_checkpointing_give_the_same_curves(folder: Path, world: World, kept: str) -> None:
    batches = make_batches()
    case = Case("llama3", micro=2)
    config = replace(case, checkpointing="selective" if kept == "selective" else "full").config(
        folder, steps=len(batches), rows=len(batches[0].input_ids)
    )
    section = config.activation_checkpointing.model_copy(update={"offload": kept == "offload"})
    found = Sharded(config.model_copy(update={"activation_checkpointing": section}), world=world).curves(batches)

    assert max(errors(found, run_case(folder, case, batches)).values()) < 1e-5


def test_batches_go_to_the_device_without_a_wait(folder: Path, world: World) -> None:
    sharded, batch = _ready(folder)
    to_device = sharded.inputs
    micro: Batch = batch.micro_batches[0]
    to_device(micro)  # the first use of pinned memory and of the allocator may wait
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")  # a copy that waits for the device raises
    try:
        inputs = to_device(micro)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    torch.cuda.synchronize()
    assert {tensor.device.type for tensor in inputs.values()} == {"cuda"}
    assert torch.equal(inputs["input_ids"].cpu(), micro.input_ids)
    assert torch.equal(inputs["labels"].cpu(), micro.labels)


@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_step_waits_for_the_device_once(folder: Path, world: World, micro: int, checkpointing: str) -> None:
    """Reading the batch, moving it, the step with clipping, and its record: as torch's own debug mode counts."""
    fsdp = (("param_dtype", "bfloat16"),)
    case = Case("llama3", micro=micro, fsdp=fsdp, checkpointing=checkpointing, attention="varlen")
    config = case.config(folder, steps=3, rows=4)
    sharded = build(config)
    throughput = Recorder(sharded).throughput
    optimizer = build_optimizer(config.optimizer, sharded.model)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=3)
    loader = RankBatches(make_batches(3), micro)
    for index in range(3):  # the first uses of kernels and pinned memory may wait
        torch.cuda.synchronize()
        with count_host_syncs(world.device) as syncs:
            batch = next_batch(loader, index, mesh=sharded.mesh)
            step(sharded, optimizer, schedule, batch, number=index + 1)
            throughput.add(batch.input_tokens, batch.supervised_tokens, batch.attention_pairs, batch.seconds)
            throughput.record()
    assert syncs.calls == {"synchronizing operation": 1}, syncs.places


@pytest.mark.parametrize("wait", ["item", "nonzero", "pageable", "synchronize"])
def test_waits_are_counted(world: World, wait: str) -> None:
    x, host = torch.ones(8, device=world.device), torch.ones(8)
    with count_host_syncs(world.device) as syncs:
        {
            "item": lambda: x.sum().item(),
            "nonzero": lambda: x.nonzero(),
            "pageable": lambda: host.to(world.device),
            "synchronize": lambda: torch.cuda.synchronize(),
        }[wait]()
    assert syncs.count >= 1


def test_pinned_buffers_may_be_reused_at_once(world: World) -> None:
    """A second batch must not overwrite the pinned memory that the first one's copy still reads."""
    config = TrainingConfig(recipe="none")
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    to_device = build_slice_batch(_TinyConfig(), path=AttentionPath(None, "sdpa"), mesh=mesh)
    hosts = [torch.full((8, 65536), number) for number in range(16)]
    torch.cuda._sleep(200_000_000)  # the copies queue up behind this

    moved = [to_device(Batch(host, host, host, 1, 1, 1))["input_ids"] for host in hosts]

    torch.cuda.synchronize()
    assert all(torch.equal(one.cpu(), host) for one, host in zip(moved, hosts, strict=True))


def test_peak_memory_is_the_allocators_maximum(folder: Path, world: World) -> None:
    config = Case("smollm2").config(folder, steps=1, rows=4)
    throughput = Recorder(build(config)).throughput
    throughput.add(1, 1, 1, 0.0)
    block = torch.empty(256 * 2**20, dtype=torch.uint8, device=world.device)
    del block

    record = throughput.record()

    assert record["memory_gib"] == pytest.approx(torch.cuda.max_memory_allocated() / 2**30)
    assert record["memory_gib"] >= 0.25


def test_each_phase_has_its_own_peak(world: World) -> None:
    phases = PhaseMemory(world.device, by_phase=True)
    sizes = {"forward": 64, "backward": 192, "optimizer": 128}
    phases.end(None)
    base = torch.cuda.memory_allocated()
    with count_host_syncs(world.device) as syncs:
        for phase, size in sizes.items():
            torch.empty(size * 2**20, dtype=torch.uint8, device=world.device)
            phases.end(phase)
    assert {phase: (peak - base) / 2**20 for phase, peak in phases.phases.items()} == sizes
    assert phases.highest >= base + 192 * 2**20
    assert syncs.count == 0


def test_what_sleeps_is_free_for_others(world: World) -> None:
    """By the allocator's count. Other processes change the driver's."""
    layers = [nn.Linear(16384, 16384, bias=False, device=world.device) for _ in range(4)]
    model = fully_shard(nn.Sequential(*layers), mesh=init_device_mesh("cuda", (1,)))
    before = [local_part(parameter).double().sum().item() for parameter in model.parameters()]
    torch.cuda.empty_cache()
    awake = torch.cuda.memory_reserved()

    moved = sleep(model, None)
    asleep = torch.cuda.memory_reserved()
    wake_up(model)

    assert moved.nbytes == 4 * 2**30
    assert awake - asleep == 4 * 2**30
    assert [local_part(parameter).double().sum().item() for parameter in model.parameters()] == before


DETERMINISTIC_RUN = """
import hashlib, json, sys
from pathlib import Path
from fsdp2kit.job import distributed
distributed.start(deterministic=True)  # before CUDA starts: cuBLAS reads its settings then
from tests.support.cases import Case, run_case
from tests.support.models import make_batches
case = Case("smollm2", micro=2, fsdp=(("param_dtype", "bfloat16"),), checkpointing=True)
curves = run_case(Path(sys.argv[1]), case, make_batches())
digest = hashlib.sha256(b"".join(curves.gradients[name].tobytes() for name in sorted(curves.gradients)))
print(json.dumps([curves.loss, curves.grad_norm, digest.hexdigest()]))
distributed.stop()
"""


def test_deterministic_runs_repeat_bit_for_bit(folder: Path) -> None:
    command = [sys.executable, "-c", DETERMINISTIC_RUN, str(folder)]
    root = Path(__file__).resolve().parents[2]
    first, second = (subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300) for _ in range(2))

    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    assert first.stdout == second.stdout


def _ready(folder: Path, *fsdp: tuple[str, str]) -> tuple[Sharded, GlobalBatch]:
    """A sharded model and its first global batch."""
    sharded = build(Case("smollm2", micro=2, fsdp=fsdp).config(folder, steps=5, rows=4))
    return sharded, next_batch(RankBatches(make_batches(), 2), 0, mesh=sharded.mesh)


class _TinyConfig:
    """What the batch needs of a model's config."""

    num_hidden_layers = 1

    def get_text_config(self) -> _TinyConfig:
        return self
