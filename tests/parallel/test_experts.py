"""Partitioned experts over ``mesh.ep``: the operator, training on any mesh, and checkpoints that fit any ep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fsdp2kit.errors import UserError
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import device_mesh
from fsdp2kit.parallel.expert_parallel.exchange import shares
from fsdp2kit.parallel.expert_parallel.experts import ExpertKind, register_kind, routed_experts
from fsdp2kit.parity.reference import errors, plain_loop, worst_relative
from fsdp2kit.train.step import gradient_norm
from tests.parallel.helpers.check import check
from tests.support.cases import Case, run_cases
from tests.support.models import (
    MIXTURES,
    beyond,
    demo_model_dir,
    full,
    make_batches,
    plain_batches,
    slow,
    tiny_model_dir,
)
from tests.support.runs import losses, resume, runner, write_run
from tests.support.workers import WorkerPool

EXPERTS, TOKENS, VISITED, WIDTH = 7, 10, 3, 16
HYBRID = (("strategy", "hybrid_shard"),)
ONCE = (("reduce_every_micro_batch", False),)
DEFAULT = [Case("mixtral", 2, 1, 2, ep=2, pack=False)]
FULL = [
    Case("qwen3_moe", 2, 2, 1, ep=4, checkpointing="full"),
    Case("qwen3_moe", 2, 2, 2, ep=2, checkpointing="selective"),
    Case("mixtral", 4, 1, 1, ONCE, ep=4, pack=False),
    Case("qwen3_moe", 4, 1, 1, (("strategy", "shard_grad_op"),), ep=2, checkpointing="full"),
]

# Sizes of dp, cp, ep and dp_replicate.
MESHES = [(2, 1, 2, 1), (1, 2, 2, 1), (4, 1, 2, 1), (4, 1, 4, 1), (2, 2, 4, 1), (4, 1, 2, 2)]
FAMILIES = ["qwen3_moe", "mixtral", *MIXTURES]


def pairs(kind: str) -> list[Case]:
    """A family on every mesh; over all families, each mesh meets each mode, packed and not, accumulating and not."""
    first, cases = FAMILIES.index(kind), []
    for number, (dp, cp, ep, replicas) in enumerate(MESHES):
        mode = ("none", "full", "selective")[(first + number) % 3]
        micro = (1, rows_of(dp) // dp)[(first + number // 2) % 2]
        fsdp = HYBRID if replicas > 1 else ()
        options = {"dp_replicate": replicas, "checkpointing": mode, "pack": (first + number) % 2 == 0}
        if kind == "gpt_oss":  # transformers' sdpa has no sinks
            options["attention"] = "auto"
        cases.append(Case(kind, dp, cp, micro, fsdp, ep=ep, **options))
    return cases


def one_mesh(kind: str) -> list[Case]:
    """One of `pairs`: over all families, each mesh."""
    number = {"gpt_oss": 0, "olmoe": 4}.get(kind, FAMILIES.index(kind))
    return [pairs(kind)[number]]


def rows_of(dp: int) -> int:
    """Rows of a global batch: at least two a rank, so that it can accumulate."""
    return 2 * max(2, dp)


def experts_of(kind: type) -> Any:
    """A module of transformers with experts, in its own loop over them."""
    names = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "moe_intermediate_size": 12}
    model_type = "gpt_oss" if kind is GptOssExperts else "qwen3_moe"
    config = AutoConfig.for_model(model_type, hidden_size=WIDTH, intermediate_size=12, **names)
    config._experts_implementation = "eager"
    module = kind(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def compare_with_transformers(kind: type, ranks: int) -> list[float]:
    """Largest differences of this rank's output and gradients from those of one process with all tokens."""
    distributed.start()
    torch.manual_seed(0)
    module, rank = experts_of(kind), distributed.rank()
    hidden = [torch.randn(TOKENS, WIDTH, requires_grad=True) for _ in range(ranks)]
    # No token visits the last expert; all tokens of rank 0 visit the same ones.
    index = [torch.stack([torch.randperm(EXPERTS - 1)[:VISITED] for _ in range(TOKENS)]) for _ in range(ranks)]
    index[0][:] = torch.arange(VISITED)
    weights = [torch.rand(TOKENS, VISITED, requires_grad=True) for _ in range(ranks)]
    slopes = [torch.randn(TOKENS, WIDTH) for _ in range(ranks)]
    expected = [module(*inputs) for inputs in zip(hidden, index, weights, strict=True)]
    torch.stack([(out * slope).sum() for out, slope in zip(expected, slopes, strict=True)]).sum().backward()

    held = shares(EXPERTS, ranks)
    own = slice(sum(held[:rank]), sum(held[: rank + 1]))
    names = [name for name, _ in module.named_parameters()]
    parameters = [module.get_parameter(name).detach()[own].clone().requires_grad_() for name in names]
    kept = ExpertKind(f"{kind.__name__} of a test", module._apply_gate, module.is_transposed, module.has_bias)
    register_kind(kept)
    x, w = hidden[rank].detach().requires_grad_(), weights[rank].detach().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    out, *_ = routed_experts(x, index[rank], w, parameters, EXPERTS, kept.name, group.group_name)
    (out * slopes[rank]).sum().backward()
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(out.detach(), expected[rank].detach())]
    pairs += [(x.grad, hidden[rank].grad), (w.grad, weights[rank].grad)]
    for name, parameter in zip(names, parameters, strict=True):
        whole = module.get_parameter(name).grad
        pairs.append((parameter.grad, whole[own]))
    return [float((one - other).abs().max()) for one, other in pairs if one is not None and other is not None]


@pytest.mark.full
@pytest.mark.parametrize("kind", [Qwen3MoeExperts, GptOssExperts])
@pytest.mark.parametrize("ranks", [2, 4, 1])
def test_the_operator_is_that_of_transformers(kind: type, ranks: int, pool: WorkerPool) -> None:
    """Uneven experts, one without tokens, and biases, transposed weights and interleaved gates of gpt-oss."""
    for found in pool.run(ranks, compare_with_transformers, kind, ranks):
        assert len(found) == 3 + (4 if kind is GptOssExperts else 2)
        assert max(found) < 1e-5


@pytest.mark.parametrize("case", [*DEFAULT, *map(full, FULL)], ids=str)
def test_training_equals_the_plain_loop(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    path = tiny_model_dir(case.kind, tmp_path)
    batches = make_batches() if case.pack else plain_batches()
    exact, other = (plain_loop(path, batches, lr=1e-3, micro_batch_size=size) for size in (4, 1))
    found = pool.run(case.world, run_cases, tmp_path, [case])[0][0]
    assert found.gradients.keys() == exact.gradients.keys()
    assert not beyond(errors(found, exact), errors(other, exact))


@pytest.mark.parametrize(("choose", "steps"), [full(one_mesh, 3), slow(pairs, 5)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_train_as_in_the_plain_loop(
    kind: str, choose: Callable[[str], list[Case]], steps: int, pool: WorkerPool, tmp_path: Path
) -> None:
    """Uneven experts, groups of them, biases, an idle one; gradients are clipped."""
    path = tiny_model_dir(kind, tmp_path)
    groups: dict[tuple[bool, int], list[Case]] = {}
    for case in choose(kind):
        groups.setdefault((case.pack, rows_of(case.dp)), []).append(case)
    for (pack, rows), cases in groups.items():
        batches = (make_batches if pack else plain_batches)(steps, rows=rows)
        # gpt-oss makes its masks without positions, and would let packed documents see each other.
        loop = partial(plain_loop, path, batches, lr=1e-3, alone=pack and kind == "gpt_oss")
        exact, other = (loop(micro_batch_size=size) for size in (rows, 1))
        assert min(exact.grad_norm) > 0.5, "nothing is clipped"
        for world in sorted({case.world for case in cases}):
            chosen = [case for case in cases if case.world == world]
            for case, found in zip(chosen, pool.run(world, run_cases, tmp_path, chosen, batches)[0], strict=True):
                assert found.gradients.keys() == exact.gradients.keys()
                assert not beyond(errors(found, exact), errors(other, exact)), case


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = demo_model_dir(tmp_path_factory.mktemp("moe"), kind="qwen3_moe")
    return write_run(folder, steps=4, checkpoint="every = 2, keep = 9")


ANY_EP = ((1, ()), (4, ("mesh.ep=4",)), (2, ("mesh.ep=2", "mesh.cp=2")))
OPTIMIZERS = ("adamw_bf16", "adamw_8bit", "muon")


@pytest.mark.parametrize(
    ("optimizer", "meshes"),
    [
        full("adamw", ANY_EP),
        full("muon", ANY_EP[:1]),
        *(slow(name, ANY_EP) for name in OPTIMIZERS),
    ],
)
def test_checkpoints_fit_any_ep(
    optimizer: str, meshes: Sequence[tuple[int, Sequence[str]]], pool: WorkerPool, toml: Path, tmp_path: Path
) -> None:
    """Saved with ep = 2, resumed with others; and the export is that of one rank."""
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao")
    run, name = runner(pool, toml), f"optimizer.name={optimizer}"
    run(tmp_path / "straight", 4, name, "mesh.ep=2", "mesh.cp=2")
    straight, checkpoint = losses(tmp_path / "straight"), tmp_path / "straight" / "checkpoints" / "step-000002"
    for size, overrides in meshes:
        resumed = resume(run, checkpoint, tmp_path / f"{size}", size, name, *overrides)
        assert worst_relative([line["loss"] for line in resumed], straight[2:]) < 1e-5
    one, partitioned = (AutoModelForCausalLM.from_pretrained(tmp_path / run / "hf") for run in ("1", "straight"))
    differences = [(p - q).abs().max() for p, q in zip(one.parameters(), partitioned.parameters(), strict=True)]
    assert max(differences) < (1e-3 if optimizer in ("muon", "adamw_8bit") else 1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {}, r"mesh.ep: 2, but LlamaForCausalLM has no experts"),
        ("jetmoe", {"num_hidden_layers": 2}, r"mesh.ep: 2, but JetMoeForCausalLM has no experts that transformers'"),
        ("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 1}, r"2 ranks for 1 experts.*use 1"),
    ],
)
def test_refuses_what_cannot_be_partitioned(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(kind, ep=2, **options)


def norm_over_two_dims() -> tuple[float, float, list[str]]:
    """`gradient_norm` where some gradients are sharded over two dimensions, the plain norm, and what torch warned."""
    distributed.start()
    torch.manual_seed(0)
    net, said = torch.nn.Module(), _Said()
    meshes = device_mesh("cpu", {"shard": 2, "expert": 2}), device_mesh("cpu", {"replicate": 2, "shard": 2})
    shardings = (meshes[0], [Shard(1), Shard(0)]), (meshes[1], [Replicate(), Shard(0)])
    values = [torch.randn(5, 6, 3) for _ in shardings]
    for number, (value, (mesh, placements)) in enumerate(zip(values, shardings, strict=True)):
        parameter = torch.nn.Parameter(distribute_tensor(value, mesh, placements))
        parameter.grad = parameter.detach().clone()
        net.register_parameter(f"weight{number}", parameter)
    logger = logging.getLogger("torch.distributed.tensor")
    logger.addHandler(said)
    try:
        found = gradient_norm(net).item()
    finally:
        logger.removeHandler(said)
    return found, torch.cat(values).norm().item(), said.lines


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_the_norm_over_two_dimensions_of_a_mesh_makes_torch_warn_of_nothing(pool: WorkerPool) -> None:
    for found, expected, said in pool.run(4, norm_over_two_dims):
        assert found == pytest.approx(expected, rel=1e-6)
        assert said == []


def test_every_expert_is_on_one_rank() -> None:
    for experts in range(1, 20):
        for count in range(1, 9):
            assert sum(shares(experts, count)) == experts
            chunks = torch.arange(experts).chunk(count)
            assert shares(experts, count)[: len(chunks)] == [len(chunk) for chunk in chunks]
