"""Distillation against torch's own KL divergence on the full logits of two plain models in one process."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.config.sections.distill import DistillConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.head_chunks import _CHUNK_BYTES
from fsdp2kit.model.loss_head import LossHead
from fsdp2kit.objectives.distillation import (
    _check_inputs,
    _config_of_teacher,
    build_distillation,
    build_teacher,
    divergence,
    of_student,
)
from fsdp2kit.parallel.context_parallel.layout import AttentionPath
from fsdp2kit.parity.engine import RankBatches, whole
from fsdp2kit.parity.reference import Rows, gradient_of, load_plain, plain_logits
from fsdp2kit.train.step import MetricNames, accumulate_gradients, next_batch
from tests.support.cases import Case, build
from tests.support.models import make_batches, plain_batches, tiny_model, tiny_model_dir
from tests.support.workers import WorkerPool

SECTIONS = [
    {},
    {"direction": "reverse"},
    {"temperature": 2.5, "cross_entropy_weight": 0.3},
    {"direction": "reverse", "temperature": 0.7, "cross_entropy_weight": 0.5},
]


def expected_sums(logits: Tensor, target: Tensor, labels: Tensor, section: DistillConfig) -> Tensor:
    """Summed loss, divergence and cross-entropy ``[3]`` of full logits ``[N, V]``, by torch."""
    shared, temperature = min(logits.shape[1], target.shape[1]), section.temperature
    model, teacher = ((one[:, :shared] / temperature).log_softmax(-1) for one in (logits, target))
    sides = (model, teacher) if section.direction == "forward" else (teacher, model)
    kl = F.kl_div(*sides, log_target=True, reduction="sum")
    cross_entropy, weight = F.cross_entropy(logits, labels, reduction="sum"), section.cross_entropy_weight
    return torch.stack([(1 - weight) * temperature**2 * kl + weight * cross_entropy, kl, cross_entropy])


def heads(
    count: int, *, vocabularies: Sequence[int] = (50, 50), dtype: torch.dtype = torch.float32
) -> tuple[Tensor, LossHead, Tensor, LossHead, Tensor]:
    """Hidden states and head of a student of width 24, which is trained, and of a teacher of width 36; and labels."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(min(vocabularies), (count,), generator=generator)
    found: list[Any] = []
    for vocabulary, width in zip(vocabularies, (24, 36), strict=True):
        head: Any = nn.Linear(width, vocabulary, bias=False)
        hidden = torch.randn(count, width, generator=generator).to(dtype).requires_grad_(not found)
        weight = torch.randn(vocabulary, width, generator=generator).mul(0.3).to(dtype)
        head.weight = nn.Parameter(weight, requires_grad=not found)
        head.__class__, head.own = type("Head", (LossHead, nn.Linear), {}), None
        found += [hidden, head]
    return *found, labels


def distill(
    hidden: Tensor, head: LossHead, states: Tensor, teacher: LossHead, labels: Tensor, section: DistillConfig
) -> tuple[Tensor, Tensor]:
    of_chunk = partial(of_student, head=teacher, states=states, section=section)
    return head(hidden, labels, of_chunk, beside=len(teacher.weight))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 20.0, 1000.0])
def test_a_high_temperature_costs_no_digits(temperature: float, direction: Any) -> None:
    """The divergence falls with T², and the rounding of its terms does not."""
    section = DistillConfig(temperature=temperature, direction=direction)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(16, 20_000, generator=generator)
    target = logits + 0.7 * torch.randn(16, 20_000, generator=generator)
    labels = torch.zeros(16, dtype=torch.int64)

    values, gradient = divergence(logits, target, labels, section)

    exact = logits.double().requires_grad_()
    sums = expected_sums(exact, target.double(), labels, section)
    sums[0].backward()
    torch.testing.assert_close(values.double().sum(0), sums.detach(), rtol=max(1e-5, 3e-7 * temperature), atol=0)
    assert exact.grad is not None
    assert (gradient.double() - exact.grad).norm() <= 2e-3 * exact.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabularies", [(50, 50), (50, 60), (60, 50)])
@pytest.mark.parametrize("options", SECTIONS, ids=str)
def test_values_and_gradients(
    options: dict[str, Any], vocabularies: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one vocabulary is padded: the distributions are then those over the ids that both have."""
    monkeypatch.setitem(_CHUNK_BYTES, "cpu", 7 * 4 * sum(vocabularies))
    section = DistillConfig(**options)
    for count in (0, 7, 15):
        hidden, head, states, teacher, labels = heads(count, vocabularies=vocabularies, dtype=dtype)
        loss, values = distill(hidden, head, states, teacher, labels, section)
        loss.backward()
        exact = [one.detach().double() for one in (hidden, head.weight, states, teacher.weight)]
        logits = exact[0].requires_grad_() @ exact[1].requires_grad_().T
        sums = expected_sums(logits, exact[2] @ exact[3].T, labels, section)
        sums[0].backward()
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2  # logits are rounded to bfloat16's eight bits
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double().sum(0), sums.detach(), rtol=tolerance, atol=1e-12)
        assert loss.item() == pytest.approx(sums[0].item(), rel=tolerance)
        for mine, other in zip((hidden, head.weight), exact, strict=False):
            assert distance(mine.grad, other.grad) <= tolerance


def distance(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.norm())
    return float((found.double() - expected.double()).norm()) / (scale or 1.0)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is active, and still alive, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak, self._known = 0, 0, set()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        found = function(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given | self._known and storage.nbytes():
                self._known.add(storage.data_ptr())
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._free, storage.data_ptr(), storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return found

    def _free(self, pointer: int, size: int) -> None:
        self._known.discard(pointer)
        self.alive -= size


@pytest.mark.parametrize("options", SECTIONS, ids=str)
def test_memory_is_that_of_a_chunk(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, rows = 4000, 8
    monkeypatch.setitem(_CHUNK_BYTES, "cpu", rows * 4 * 2 * vocabulary)
    peaks = []
    for count in (2 * rows, 10 * rows):
        hidden, head, *others = heads(count, vocabularies=(vocabulary, vocabulary))
        gc.collect()
        with PeakMemory() as memory:
            distill(hidden, head, *others, DistillConfig(**options))
        # What is kept for backward, and what is returned.
        kept = 4 * (hidden.numel() + head.weight.numel() + 3 * count)
        peaks.append(memory.peak - kept)
    chunk = 4 * rows * vocabulary
    assert peaks[1] <= 1.01 * peaks[0], "a chunk's, not that of all tokens"
    assert chunk < peaks[1] <= 8.01 * chunk


def write_teacher(folder: Path, name: str, kind: str = "llama3", **differing: Any) -> Path:
    """A tiny model of other sizes than the students."""
    config = tiny_model(kind).config
    for key, value in {"num_hidden_layers": 3, **differing}.items():
        setattr(config, key, value)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / name)
    return folder / name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("smollm2", "llama3", "cohere"):
        tiny_model_dir(kind, folder)
    smaller = {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}
    write_teacher(folder, "untied", **smaller)
    write_teacher(folder, "tied", "smollm2")
    write_teacher(folder, "own_head", "granite")
    return folder


def first_steps(folder: Path, cases: Sequence[tuple[Case, str, dict[str, Any]]]) -> list[tuple[list[float], dict]]:
    """For each case, teacher and section: loss and metrics of the first global batch, and its gradients."""
    found = []
    for case, teacher_name, options in cases:
        batches = make_batches(1) if case.pack else plain_batches(1)
        sharded = build(case.config(folder, steps=1, rows=len(batches[0].input_ids)))
        config, mesh, model = sharded.config, sharded.mesh, sharded.model
        section = DistillConfig(teacher=str(folder / teacher_name), **options)
        teacher = build_teacher(section, model, config=config, plan=sharded.plan, tokenizer=None)
        objective = build_distillation(section, teacher, config=config, mesh=mesh)
        names = MetricNames()
        loader = RankBatches(batches, config.train.micro_batch_size, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)
        first, shard = next_batch(loader, 0, mesh=mesh), sharded.inputs
        local = accumulate_gradients(model, first, objective=objective, names=names, shard=shard, fsdp=config.fsdp)
        assert all(parameter.grad is None for parameter in teacher.model.parameters())
        assert names.names == ("cross_entropy", "kl")
        gradients = {name: whole(gradient_of(parameter)) for name, parameter in model.named_parameters()}
        found.append((mesh.sum_loss(local.double()).tolist(), gradients))
    return found


def expected_step(student: Path, teacher: Path, rows: Rows, section: DistillConfig) -> tuple[list[float], dict]:
    """The same by plain transformers."""
    plain, index = load_plain(student), (rows.labels.flatten() != -100).nonzero().squeeze(1)
    with torch.no_grad():
        target = plain_logits(load_plain(teacher).eval(), rows).flatten(0, 1)[index]
    logits = plain_logits(plain, rows).flatten(0, 1)[index]
    means = expected_sums(logits, target, rows.labels.flatten()[index], section) / len(index)
    means[0].backward()
    return means.tolist(), {name: parameter.grad for name, parameter in plain.named_parameters()}


MESHES = [
    (Case("smollm2"), "untied", SECTIONS[0]),
    (Case("llama3", micro=4), "tied", SECTIONS[2]),
    (Case("smollm2", 2, 1, micro=2), "untied", SECTIONS[1]),
    (Case("llama3", 1, 2, pack=False), "untied", SECTIONS[3]),
    (Case("cohere", 2, 1, attention="auto"), "own_head", SECTIONS[2]),
    (Case("smollm2", 1, 2, method="ring", attention="auto", checkpointing=True), "tied", SECTIONS[3]),
    (Case("llama3", 2, 2, micro=2, fsdp=(("strategy", "shard_grad_op"),)), "own_head", SECTIONS[0]),
    (Case("smollm2", 2, 2, pack=False), "untied", SECTIONS[2]),
    (Case("llama3", 2, 2, fsdp=(("strategy", "hybrid_shard"),), dp_replicate=2), "untied", SECTIONS[1]),
]


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_loss_and_gradients_are_those_of_full_logits(world: int, models: Path, pool: WorkerPool) -> None:
    cases = [case for case in MESHES if case[0].world == world]
    found = pool.run(world, first_steps, models, cases)[0]
    for (case, teacher, options), (sums, gradients) in zip(cases, found, strict=True):
        rows = (make_batches(1) if case.pack else plain_batches(1))[0]
        section = DistillConfig(**options)
        (loss, kl, cross_entropy), expected = expected_step(models / case.kind, models / teacher, rows, section)
        assert sums == pytest.approx([loss, cross_entropy, kl], rel=1e-5), case
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert distance(gradient, expected[name]) < 1e-5, (case, name)


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        ({"recurrent_layers": 1}, {}, "carry a state"),
        ({}, {"recurrent_layers": 1}, "carry no state"),
        ({"masks_every_row": True}, {}, "its own masks"),
        ({"masks_every_row": True}, {"masks_every_row": True}, None),
        ({}, {"masks_every_row": True}, None),
    ],
)
def test_a_teacher_needs_of_a_batch_what_the_model_does(
    theirs: dict[str, Any], ours: dict[str, Any], says: str | None
) -> None:
    model = tiny_model("smollm2")
    paths = (AttentionPath(None, "sdpa", **one) for one in (theirs, ours))
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        _check_inputs(model, next(paths), model, next(paths))


def test_balance_of_experts_is_asked_of_the_model_alone() -> None:
    """A dense teacher has none."""
    config = TrainingConfig.model_validate({"recipe": "x", "moe": {"balance": "aux", "aux_weight": 0.01}})
    plan: Any = SimpleNamespace(attention=AttentionPath(None, "sdpa"))
    theirs = _config_of_teacher(DistillConfig(teacher="t"), config, plan)
    assert (theirs.moe.balance, config.moe.balance) == ("none", "aux")
    assert theirs.model.path == "t"


def test_a_teachers_heads_are_tried_with_the_kernel_of_the_process() -> None:
    config = TrainingConfig.model_validate({"recipe": "x", "model": {"kernel": "flash3"}})
    plan: Any = SimpleNamespace(attention=AttentionPath(None, "varlen"))
    assert _config_of_teacher(DistillConfig(teacher="t"), config, plan).model.kernel == "flash3"


def test_a_teacher_with_chunks_in_other_layers_is_refused() -> None:
    model, teacher = tiny_model("llama4"), tiny_model("llama4")
    teacher.config.layer_types = model.config.layer_types[::-1]
    for kernel, refused in (("varlen", True), ("sdpa", False)):
        path = AttentionPath(None, kernel)
        with pytest.raises(UserError, match="in chunks") if refused else contextlib.nullcontext():
            _check_inputs(teacher, path, model, path)
