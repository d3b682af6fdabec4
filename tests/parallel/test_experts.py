"""Experts that are dealt out over ``mesh.ep``: the operator, training on any mesh, and checkpoints that fit any ep."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
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

from fsdp2kit import distributed
from fsdp2kit.errors import UserError
from fsdp2kit.parallel.expert_parallel.exchange import shares
from fsdp2kit.parallel.expert_parallel.experts import ExpertKind, register_kind, routed_experts
from fsdp2kit.parallel.mesh import device_mesh
from fsdp2kit.parity.reference import errors, plain_loop, worst_relative
from fsdp2kit.train.step import gradient_norm
from tests.parallel.jobs import Case, run_cases
from tests.parallel.test_preflight import check
from tests.reference import (
    DEMO,
    MIXTURES,
    beyond,
    demo_model_dir,
    full,
    make_batches,
    plain_batches,
    tiny_model_dir,
)
from tests.test_elastic import losses, run_and_record
from tests.workers import WorkerPool

EXPERTS, TOKENS, VISITED, WIDTH = 7, 10, 3, 16
HYBRID = (("strategy", "hybrid_shard"),)
ONCE = (("reduce_every_micro_batch", False),)
DEFAULT = [Case("qwen3_moe", 2, 2, 1, ep=4, checkpointing="full"), Case("mixtral", 2, 1, 2, ep=2, pack=False)]
FULL = [
    Case("qwen3_moe", 2, 1, 2, ep=2),
    Case("qwen3_moe", 1, 2, 2, ep=2),
    Case("mixtral", 4, 1, 1, ep=2),
    Case("qwen3_moe", 2, 2, 2, ep=2, checkpointing="selective"),
    Case("qwen3_moe", 4, 1, 1, HYBRID, dp_replicate=2, ep=2, checkpointing="selective"),
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
        if kind == "gpt_oss":  # its attention has sinks: neither packed nor context-parallel
            options |= {"attention": "eager", "pack": False}
        if kind != "gpt_oss" or cp == 1:
            cases.append(Case(kind, dp, cp, micro, fsdp, ep=ep, **options))
    return cases


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
        # FSDP averages over fewer ranks, which the operator makes up for.
        pairs.append((parameter.grad * ranks if parameter.grad is not None else None, whole[own]))
    return [float((one - other).abs().max()) for one, other in pairs if one is not None and other is not None]


@pytest.mark.parametrize("kind", [Qwen3MoeExperts, GptOssExperts])
@pytest.mark.parametrize("ranks", [2, full(4), full(1)])
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


@pytest.mark.full
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_train_as_in_the_plain_loop(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    """Uneven experts, groups of them, biases, an idle one; gradients are clipped."""
    path = tiny_model_dir(kind, tmp_path)
    groups: dict[tuple[bool, int], list[Case]] = {}
    for case in pairs(kind):
        groups.setdefault((case.pack, rows_of(case.dp)), []).append(case)
    for (pack, rows), cases in groups.items():
        batches = (make_batches if pack else plain_batches)(rows=rows)
        exact, other = (plain_loop(path, batches, lr=1e-3, micro_batch_size=size) for size in (rows, 1))
        assert min(exact.grad_norm) > 0.5, "nothing is clipped"
        for world in sorted({case.world for case in cases}):
            chosen = [case for case in cases if case.world == world]
            for case, found in zip(chosen, pool.run(world, run_cases, tmp_path, chosen, batches)[0], strict=True):
                assert found.gradients.keys() == exact.gradients.keys()
                assert not beyond(errors(found, exact), errors(other, exact)), case


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    demo_model_dir(folder, kind="qwen3_moe")
    path = folder / "run.toml"
    path.write_text(
        f"""
        recipe = "sft"
        model.path = "{folder}"
        fsdp.param_dtype = "float32"
        data = {{ path = "{DEMO / "chat.jsonl"}", seq_len = 64 }}
        train = {{ steps = 6, global_batch_size = 4 }}
        optimizer.lr = 2e-4
        checkpoint = {{ every = 3, keep = 9 }}
        wandb.mode = "disabled"
        """,
        encoding="utf-8",
    )
    return path


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16", "adamw_8bit", "muon"])
def test_checkpoints_fit_any_ep(optimizer: str, pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    """Saved with ep = 2, resumed with 1, 2 and 4; and the export is that of one rank."""
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao")
    name = f"optimizer.name={optimizer}"

    def run(size: int, directory: Path, overrides: Sequence[str]) -> list[float]:
        pool.run(size, run_and_record, str(toml), [f"run.dir='{directory}'", name, *overrides])
        return losses(directory)

    straight = run(4, tmp_path / "straight", ["mesh.ep=2", "mesh.cp=2"])
    assert worst_relative(run(1, tmp_path / "one", []), straight) < 1e-5
    one, dealt = (AutoModelForCausalLM.from_pretrained(tmp_path / run / "hf") for run in ("one", "straight"))
    differences = [(p - q).abs().max() for p, q in zip(one.parameters(), dealt.parameters(), strict=True)]
    assert max(differences) < (1e-3 if optimizer in ("muon", "adamw_8bit") else 1e-5)
    for size, overrides in ((1, []), (4, ["mesh.ep=4"]), (2, ["mesh.ep=2", "mesh.cp=2"])):
        directory, checkpoint = tmp_path / f"{size}", Path("checkpoints") / "step-000003"
        shutil.copytree(tmp_path / "straight" / checkpoint, directory / checkpoint)
        assert worst_relative(run(size, directory, overrides), straight[3:]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {}, r"mesh.ep: 2, but LlamaForCausalLM has no experts"),
        ("jetmoe", {"num_hidden_layers": 2}, r"mesh.ep: 2, but JetMoeForCausalLM has no experts that transformers'"),
        ("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 1}, r"2 ranks for 1 experts.*use 1"),
    ],
)
def test_refuses_what_cannot_be_dealt_out(kind: str, options: dict[str, Any], message: str) -> None:
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
        for ranks in range(1, 9):
            assert sum(shares(experts, ranks)) == experts
            chunks = torch.arange(experts).chunk(ranks)
            assert shares(experts, ranks)[: len(chunks)] == [len(chunk) for chunk in chunks]
