"""The summed cross-entropy on the model's own head, against F.cross_entropy on the model's own logits."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp2kit.model.head_chunks import _CHUNK_BYTES, cross_entropy, cross_entropy_and_entropy, over_chunks
from fsdp2kit.model.inspect import inspect_model, shrink_config
from fsdp2kit.model.loss_head import attach_loss, select_supervised
from fsdp2kit.parity.engine import whole
from fsdp2kit.parity.reference import (
    Rows,
    cross_entropy_sum,
    errors,
    gradient_of,
    load_plain,
    plain_logits,
    plain_loop,
)
from tests.support.cases import Case, build, run_cases
from tests.support.models import beyond, full, make_batches, make_rows, slow, tiny_model, tiny_model_dir
from tests.support.workers import WorkerPool

WIDTH, VOCABULARY = 24, 50
# Model type, what its config says, and whether its logits are hidden @ weightᵀ and nothing else.
HEADS = [
    ("llama", {}, True),
    ("mistral", {}, True),
    ("mixtral", {}, True),
    ("qwen2", {}, True),
    ("qwen3", {}, True),
    ("qwen3_moe", {}, True),
    ("gemma3_text", {}, True),
    ("olmo2", {}, True),
    ("phi3", {}, True),
    ("granite", {"logits_scaling": 1.0}, True),
    ("granite", {"logits_scaling": 8.0}, False),
    ("cohere", {}, False),
    ("gemma2", {}, False),
    ("phi", {}, False),
]


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The summed cross-entropy, in chunks of seven rows."""
    return over_chunks(cross_entropy, hidden, labels, [weight], rows=7)[0]


def log_probs_of(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, in chunks of seven rows."""
    of_chunk = partial(cross_entropy_and_entropy, temperature=temperature)
    losses, values = over_chunks(of_chunk, hidden, labels, [weight], rows=7, summed=False)
    return -losses, values[:, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 6, 7, 8, 21])
def test_value_and_gradients(rows: int, dtype: torch.dtype) -> None:
    """No row, one short of a chunk's border, on it, past it, and three whole chunks."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    loss = loss_of(hidden, weight, labels)
    (loss * 0.25).backward()

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
    (expected * 0.25).backward()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2  # bfloat16 has eight bits, and logits are rounded to them
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for mine, other in zip((hidden, weight), exact, strict=True):
        assert mine.grad.dtype == dtype
        assert _distance(mine.grad, other.grad) <= tolerance


def test_confident_tokens_have_a_loss_of_nearly_zero_without_overflow() -> None:
    hidden = torch.tensor([[300.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    loss = loss_of(torch.cat([hidden, hidden]), weight, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == 600.0
    assert hidden.grad.tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "temperature"), [(0, 1.0), (7, 1.0), (21, 1.0), (20, 0.7)])
def test_log_probs_entropies_and_gradients(rows: int, temperature: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    factors = torch.randn(rows, generator=generator)  # each token's own, as a policy's advantages are
    log_probs, entropies = log_probs_of(hidden, weight, labels, temperature)
    (log_probs * factors).sum().backward()

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    whole = torch.distributions.Categorical(logits=exact[0] @ exact[1].T / temperature, validate_args=False)
    expected = whole.log_prob(labels)
    (expected * factors).sum().backward()
    tolerance = (2e-6 if dtype == torch.float32 else 1e-2) / temperature  # which multiplies the logits' rounding
    assert log_probs.dtype == entropies.dtype == torch.float32
    assert not entropies.requires_grad
    assert _distance(log_probs, expected) <= tolerance
    assert _distance(entropies, whole.entropy()) <= tolerance
    for mine, other in zip((hidden, weight), exact, strict=True):
        assert mine.grad.dtype == dtype
        assert _distance(mine.grad, other.grad) <= tolerance


def test_the_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *args: seen.append(linear(*args)) or seen[-1])
    hidden, weight = torch.randn(30, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH)
    labels = torch.zeros(30, dtype=torch.int64)
    loss_of(hidden, weight, labels).backward()
    assert [len(logits) for logits in seen] == [7, 7, 7, 7, 2]
    seen.clear()
    log_probs_of(hidden, weight, labels)[0].sum().backward()
    assert [len(logits) for logits in seen] == [7, 7, 7, 7, 2] * 2  # and again in backward


def test_backward_makes_nothing_as_large_as_the_head() -> None:
    hidden = torch.randn(3, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    loss = loss_of(hidden, weight, torch.zeros(3, dtype=torch.int64))
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        loss.backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < VOCABULARY * WIDTH * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("rows", [0, 7, 20])
def test_a_head_of_its_own(rows: int, summed: bool, dtype: torch.dtype) -> None:
    """Its logits are more than hidden @ weightᵀ; a parameter that it does not read gets no gradient."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight, bias, unread = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((rows, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,), (3,))
    )
    labels, factors = torch.randint(VOCABULARY, (rows,), generator=generator), torch.full((rows,), 0.25)

    def capped(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.tanh(F.linear(hidden, weight, bias))  # whose backward needs its result as it was

    own = partial(capped, weight=weight, bias=bias)
    found, values = over_chunks(cross_entropy, hidden, labels, [weight, bias, unread], rows=7, own=own, summed=summed)
    (found * 0.25 if summed else (found * factors).sum()).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = F.cross_entropy(capped(*exact), labels, reduction="none")
    (expected * 0.25).sum().backward()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert _distance(found, expected.sum() if summed else expected) <= tolerance
    assert _distance(values[:, 0], expected) <= tolerance
    for mine, other in zip((hidden, weight, bias), exact, strict=True):
        assert mine.grad.dtype == dtype
        assert _distance(mine.grad, other.grad) <= tolerance
    assert unread.grad is None


def test_the_gradients_of_many_chunks_add_up_in_float32() -> None:
    """A row adds 1 / VOCABULARY to each other word's gradient; a sum in bfloat16 stops growing at 256 of them."""
    rows, bias = 600, torch.zeros(VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    hidden, labels = torch.zeros(rows, WIDTH, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int64)
    weight = torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16)
    own = partial(F.linear, weight=weight, bias=bias)
    loss, _ = over_chunks(cross_entropy, hidden, labels, [bias], rows=1, own=own, summed=True)
    loss.backward()
    torch.testing.assert_close(
        bias.grad[1:].float(), torch.full((VOCABULARY - 1,), rows / VOCABULARY), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("of", ["hidden states", "the head"])
def test_only_what_is_trained_gets_a_gradient(of: str, summed: bool) -> None:
    """As where all below the head is frozen, or the head is."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(20, WIDTH, generator=generator), torch.randn(VOCABULARY, WIDTH, generator=generator)
    trained = (hidden if of == "hidden states" else weight).requires_grad_()
    labels = torch.randint(VOCABULARY, (20,), generator=generator)
    loss, _ = over_chunks(cross_entropy, hidden, labels, [weight], rows=7, summed=summed)
    (found,) = torch.autograd.grad(loss.sum(), trained)
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), trained)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_without_gradients_no_slope_is_asked_for() -> None:
    """In an evaluation, where the parameters still require gradients."""
    asked, weight = [], torch.randn(VOCABULARY, WIDTH, requires_grad=True)

    def of_chunk(*args: Any, wants_slope: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
        asked.append(wants_slope)
        return cross_entropy(*args, wants_slope=wants_slope, **options)

    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            over_chunks(of_chunk, torch.randn(3, WIDTH), torch.zeros(3, dtype=torch.int64), [weight], rows=7)
    assert asked == [False, True]


@pytest.mark.parametrize("summed", [True, False])
def test_a_second_backward_is_refused_or_right(summed: bool) -> None:
    """Gradients of the first pass are scaled in place, so a second one would scale them again."""
    hidden, weight = torch.randn(3, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    loss = (
        over_chunks(cross_entropy, hidden, torch.zeros(3, dtype=torch.int64), [weight], rows=7, summed=summed)[0].sum()
        * 0.5
    )
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()
    if summed:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, weight)
    else:
        torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], first)


@pytest.mark.parametrize(("model_type", "fields", "expected"), HEADS)
def test_heads_that_do_more_are_recognised(model_type: str, fields: dict[str, Any], expected: bool) -> None:
    config = shrink_config(AutoConfig.for_model(model_type, **fields))
    model = AutoModelForCausalLM.from_config(config)
    assert inspect_model(model).linear_head is expected
    with torch.no_grad():  # and by looking at this very model
        ids = torch.arange(1, 7)[None]
        hidden = model.eval().base_model(input_ids=ids, use_cache=False)[0]
        plain = hidden @ model.get_output_embeddings().weight.T
        same = torch.allclose(model(input_ids=ids, use_cache=False).logits, plain, atol=1e-6)
    assert same or not expected


@pytest.mark.parametrize("kind", ["smollm2", "llama3", "granite", "cohere", "gemma2", "phi", "falcon_h1"])
@pytest.mark.parametrize("supervised", [True, False])
def test_loss_sum_equals_the_models_own_logits(kind: str, supervised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_CHUNK_BYTES, "cpu", 20 * 4 * 128)  # several chunks
    rows = make_rows(3)
    rows = replace(rows, position_ids=torch.arange(rows.input_ids.shape[1]).expand(rows.input_ids.shape))  # not packed
    if not supervised:
        rows.labels.fill_(-100)
    ours, plain = _model(kind), _model(kind)
    names = list(ours.state_dict())
    attach_loss(ours)
    assert list(ours.state_dict()) == names
    loss = ours.loss_sum(rows.input_ids, rows.labels, position_ids=rows.position_ids)
    loss.backward()
    expected = cross_entropy_sum(plain_logits(plain, rows), rows.labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, mine), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None, name
        assert _distance(mine.grad, other.grad) < 2e-6, name


def test_a_head_that_gives_its_base_the_tokens_by_position() -> None:
    config = AutoConfig.for_model("gptj", vocab_size=128, n_embd=32, n_layer=2, n_head=2, rotary_dim=8, n_positions=64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    rows = make_rows(3)
    expected = cross_entropy_sum(plain_logits(copy.deepcopy(model), rows), rows.labels)
    attach_loss(model)
    loss = model.loss_sum(rows.input_ids, rows.labels, position_ids=rows.position_ids)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["smollm2", "llama3", "granite", "gemma2"])
@pytest.mark.parametrize("supervised", [True, False])
def test_token_log_probs_equal_the_models_own_logits(
    kind: str, supervised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_CHUNK_BYTES, "cpu", 20 * 4 * 128)
    rows = make_rows(3)
    rows = replace(rows, position_ids=torch.arange(rows.input_ids.shape[1]).expand(rows.input_ids.shape))  # not packed
    if not supervised:
        rows.labels.fill_(-100)
    ours, plain = _model(kind), _model(kind)
    attach_loss(ours)
    index = select_supervised(rows.labels)
    factors = torch.linspace(-1, 2, len(index))
    inputs = {"position_ids": rows.position_ids, "temperature": 0.5}
    log_probs, entropies = ours.token_log_probs(rows.input_ids, rows.labels, **inputs)
    (log_probs * factors).sum().backward()
    logits = plain_logits(plain, rows).flatten(0, 1)[index].float() / 0.5
    exact = torch.distributions.Categorical(logits=logits, validate_args=False)
    expected = exact.log_prob(rows.labels.flatten()[index])
    (expected * factors).sum().backward()
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, exact.entropy().detach(), rtol=1e-5, atol=1e-5)
    for (name, mine), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None, name
        assert _distance(mine.grad, other.grad) < 5e-6, name


def _log_prob_gradients(folder: Path, case: Case, rows: Rows) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients of Σ log p · (1 + position) over the targets, and the sums of log p and entropy, over all ranks."""
    sharded = build(case.config(folder, steps=1, rows=len(rows.input_ids)))
    mesh, model = sharded.mesh, sharded.model
    count = len(rows.input_ids) // mesh.sizes.dp
    inputs = sharded.inputs(rows[mesh.dp_rank * count : (mesh.dp_rank + 1) * count].as_batch())
    positions = inputs["position_ids"].flatten()[inputs["index"]]
    log_probs, entropies = model.token_log_probs(**inputs)
    (log_probs * (1 + positions)).sum().backward()
    sums = mesh.sum_loss(torch.stack([log_probs.detach().sum(), entropies.sum()]).double())
    return {name: whole(gradient_of(p)) for name, p in model.named_parameters()}, sums.tolist()


@pytest.mark.parametrize("kind", ["smollm2", full("llama3"), full("cohere")])
def test_token_log_probs_on_a_mesh(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    path, rows = tiny_model_dir(kind, tmp_path), make_batches(1)[0]
    plain = load_plain(path)
    index = select_supervised(rows.labels)
    exact = torch.distributions.Categorical(logits=plain_logits(plain, rows).flatten(0, 1)[index])
    expected = exact.log_prob(rows.labels.flatten()[index])
    (expected * (1 + rows.position_ids.flatten()[index])).sum().backward()
    for case in (Case(kind, 2, 1), Case(kind, 1, 2)):
        gradients, (total, entropy) = pool.run(2, _log_prob_gradients, tmp_path, case, rows)[0]
        assert total == pytest.approx(expected.sum().item(), rel=1e-5)
        assert entropy == pytest.approx(exact.entropy().sum().item(), rel=1e-5)
        for name, parameter in plain.named_parameters():
            assert _distance(gradients[name], parameter.grad) < 1e-5, name


@pytest.mark.parametrize("kind", ["smollm2", "llama3", "granite"])  # chunks of ours, and of the model's own head
def test_each_groups_sum_is_that_of_its_own_tokens_in_every_chunk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_CHUNK_BYTES, "cpu", 20 * 4 * 128)
    rows, model = make_rows(3), tiny_model(kind)
    logits = plain_logits(tiny_model(kind), rows).detach().flatten(0, 1).double()
    losses = F.cross_entropy(logits, rows.labels.flatten(), reduction="none", ignore_index=-100)
    index = select_supervised(rows.labels)
    assert len(index) > 40, "three chunks at least"
    groups = torch.arange(len(index)) // 15  # no two chunks begin with the same groups
    attach_loss(model)
    _, sums = model.loss_sum(
        rows.input_ids, rows.labels, index, groups=groups, num_groups=99, position_ids=rows.position_ids
    )
    expected = torch.zeros(99, dtype=torch.float64).index_add_(0, groups, losses[index])
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)


def test_an_index_of_the_targets_may_be_given() -> None:
    rows, model = make_rows(4), tiny_model("smollm2")
    attach_loss(model)
    index = select_supervised(rows.labels)
    assert index.tolist() == [at for at, label in enumerate(rows.labels.flatten().tolist()) if label != -100]
    inputs = {"input_ids": rows.input_ids, "labels": rows.labels, "position_ids": rows.position_ids}
    assert model.loss_sum(**inputs, index=index).item() == model.loss_sum(**inputs).item()


# Its head multiplies by a number that its base model keeps.
FALCON = {
    "lm_head_multiplier": 0.25,
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
}


def _model(kind: str) -> PreTrainedModel:
    if kind in ("gemma2", "phi", "falcon_h1"):
        falcon = kind == "falcon_h1"  # too particular about its sizes to be shrunk
        config = AutoConfig.for_model(kind, **FALCON) if falcon else shrink_config(AutoConfig.for_model(kind))
        config.attention_dropout = config.embd_pdrop = config.resid_pdrop = 0.0
        if kind == "gemma2":
            config.final_logit_softcapping = 0.5  # so tight that it matters for small logits
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
        return model
    return tiny_model(kind)


def _distance(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    found, expected = found.detach(), expected.detach()
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm()) if expected.norm() else float(difference)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "param_dtype", "output_dtype"),
    [
        ("smollm2", "bfloat16", "float32"),
        ("llama3", "bfloat16", "float32"),
        ("smollm2", "float32", "bfloat16"),
        ("llama3", "bfloat16", "bfloat16"),
        ("cohere", "bfloat16", "float32"),
        slow("smollm2", "bfloat16", "bfloat16"),
        slow("llama3", "float32", "bfloat16"),
        slow("cohere", "bfloat16", "bfloat16"),
        slow("cohere", "float32", "bfloat16"),
    ],
)
def test_units_may_return_another_dtype_than_they_compute_in(
    kind: str, param_dtype: str, output_dtype: str, pool: WorkerPool, tmp_path: Path
) -> None:
    """Tied, untied, and a head that is more than a matrix, within what computing in bfloat16 leaves uncertain."""
    path, batches = tiny_model_dir(kind, tmp_path), make_batches(3)
    exact = plain_loop(path, batches, micro_batch_size=1, lr=1e-3)
    # One run's error in a number may be small by chance: the largest of three says what bfloat16 leaves uncertain.
    narrow = [plain_loop(path, batches, micro_batch_size=n, lr=1e-3, dtype=torch.bfloat16) for n in (1, 2, 4)]
    spread = [errors(other, exact) for other in narrow]
    case = Case(kind, 2, 1, 1, (("param_dtype", param_dtype), ("output_dtype", output_dtype)))
    found = pool.run(2, run_cases, tmp_path, [case], batches)[0][0]
    assert not beyond(errors(found, exact), {name: max(each[name] for each in spread) for name in spread[0]})
