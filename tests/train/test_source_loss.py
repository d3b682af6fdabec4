"""The loss of each source of a mix: the mean over its own tokens of the global batch, whatever the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp2kit.data.build import Prefetch
from fsdp2kit.data.loader import Share, build_loader
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.model.head_chunks import _CHUNK_BYTES
from fsdp2kit.model.loss_head import attach_loss, select_supervised
from fsdp2kit.parity.reference import IGNORE, Rows, load_plain, plain_logits
from fsdp2kit.train.metrics import RECORD_KEYS
from fsdp2kit.train.step import MetricNames, Objective, cross_entropy, pack_sums, unpack_sums
from tests.data.helpers.documents import as_documents
from tests.support.cases import Case, Recorder, build, run_loop
from tests.support.models import LENGTH, VOCABULARY, make_rows, tiny_model, tiny_model_dir
from tests.support.workers import WorkerPool
from tests.train.helpers import GLOBAL, NAMES, mixed_loader


def run(folder: Path, case: Case, steps: int, objective: Objective = cross_entropy) -> list[dict[str, Any]]:
    """What our loop logs of the mix on a mesh."""
    sharded = build(case.config(folder, steps=steps, rows=GLOBAL))
    loader = mixed_loader(micro=case.micro, dp_rank=sharded.mesh.dp_rank, dp_size=sharded.mesh.sizes.dp)
    metrics = Recorder(sharded)
    run_loop(sharded, Prefetch(loader, ahead=0, stop=steps), metrics=metrics, objective=objective)
    return metrics.records


def expected_losses(path: Path, index: int) -> dict[str, float]:
    """transformers' own logits and torch's own cross-entropy of each token, by the source of its row."""
    (batch,) = mixed_loader(micro=GLOBAL).batch(index)
    assert batch.sources is not None
    with torch.no_grad():
        logits = plain_logits(load_plain(path), Rows(batch.input_ids, batch.labels, batch.position_ids))
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none", ignore_index=IGNORE)
    losses, targets = losses.view_as(batch.labels).double(), batch.labels != IGNORE
    found = {"loss": (losses.sum() / targets.sum()).item()}
    for source, name in enumerate(NAMES):
        rows = batch.sources == source
        if targets[rows].any():
            found[f"loss/{name}"] = (losses[rows].sum() / targets[rows].sum()).item()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("smollm2", "llama3", "granite"):
        tiny_model_dir(kind, folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["granite", *(pytest.param(each, marks=pytest.mark.slow) for each in ("smollm2", "llama3"))]
)
def test_each_sources_loss_is_that_of_plain_transformers_on_every_mesh(
    kind: str, pool: WorkerPool, models: Path
) -> None:
    expected = expected_losses(models / kind, 0)
    assert len(expected) > 2
    cases = [Case(kind, 1, 2, method="ring"), Case(kind, 1, 2, 2), Case(kind, 2, 1), Case(kind, 2, 1, 2)]
    for case in cases:
        for first, _ in pool.run(2, run, models, case, 2):
            found = {name: value for name, value in first.items() if name.startswith("loss")}
            assert found == pytest.approx(expected, rel=1e-5), case


def test_without_a_mix_nothing_is_carried_along() -> None:
    documents = as_documents([[(5, True)] * 8] * 4)
    (batch,) = build_loader([documents], share=Share(LENGTH, 1), pack=True, shuffle=True, seed=1).batch(0)
    assert batch.sources is None
    assert batch.tokens_by_source == ()


@pytest.mark.parametrize("kind", ["smollm2", "granite"])
def test_groups_change_neither_the_loss_nor_a_gradient(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_CHUNK_BYTES, "cpu", 20 * 4 * VOCABULARY)  # several chunks
    rows, results = make_rows(4), []
    index = select_supervised(rows.labels)
    groups = torch.arange(len(index)) % 3
    for options in ({}, {"groups": groups, "num_groups": 4}):
        model: Any = tiny_model(kind)
        attach_loss(model)
        loss = model.loss_sum(rows.input_ids, rows.labels, index, position_ids=rows.position_ids, **options)
        loss, sums = loss if options else (loss, None)
        loss.backward()
        results.append((loss.detach(), sums, [parameter.grad for parameter in model.parameters()]))
    (plain, _, gradients), (loss, sums, others) = results
    assert torch.equal(plain, loss)
    assert all(torch.equal(mine, other) for mine, other in zip(gradients, others, strict=True))
    assert not sums.requires_grad
    assert sums[3] == 0
    assert sums.sum().item() == pytest.approx(loss.item(), rel=1e-6)


# An objective's metrics


def with_metrics(model: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Cross-entropy, and sums over the targets whose means are known."""
    labels = inputs["labels"].flatten()[inputs["index"]].double()
    return *cross_entropy(model, inputs), {"label": labels.sum(), "ones": torch.tensor(labels.numel())}


@pytest.mark.parametrize("case", [Case("smollm2", 1, 2, 2), Case("smollm2", 2, 1)], ids=str)
def test_metrics_are_means_over_the_targets_of_the_global_batch_on_every_mesh(
    case: Case, pool: WorkerPool, models: Path
) -> None:
    (batch,) = mixed_loader(micro=GLOBAL).batch(0)
    label = batch.labels[batch.labels != IGNORE].double().mean().item()
    expected = {**expected_losses(models / "smollm2", 0), "label": label, "ones": 1.0}
    for first, _ in pool.run(2, run, models, case, 2, with_metrics):
        assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert {name.partition("/")[0] for name in first} <= RECORD_KEYS | {"label", "ones"}


def on_one_rank_alone(model: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
    return *cross_entropy(model, inputs), {"mine": torch.tensor(1)} if torch.distributed.get_rank() else {}


def refused(folder: Path, case: Case) -> str:
    try:
        run(folder, case, 1, on_one_rank_alone)
    except UserError as error:
        return str(error)
    return ""


def test_a_metric_of_one_rank_alone_is_refused_on_all(pool: WorkerPool, models: Path) -> None:
    for said in pool.run(2, refused, models, Case("smollm2", 2, 1)):
        assert said.startswith("objective: returns metrics")


def test_metrics_have_names_of_their_own_and_keep_them() -> None:
    names = MetricNames(reserved=RECORD_KEYS)
    names.check(["entropy", "accuracy"])
    assert names.names == ("accuracy", "entropy")
    with pytest.raises(RunFailure, match="accuracy after accuracy, entropy"):
        names.check(["accuracy"])
    for taken in ("loss", "loss/code"):
        with pytest.raises(UserError, match=taken):
            MetricNames(reserved=RECORD_KEYS).check([taken])


@pytest.mark.parametrize("sources", [None, [1.0, 2.0]])
@pytest.mark.parametrize("names", [(), ("accuracy", "entropy")])
def test_sums_that_are_packed_are_found_again(sources: list[float] | None, names: tuple[str, ...]) -> None:
    loss = torch.tensor(3.0, requires_grad=True)
    by_source = None if sources is None else torch.tensor(sources, dtype=torch.float64)
    metrics: Any = {"entropy": torch.tensor(0.5), "accuracy": 2}
    packed = pack_sums(loss, by_source, metrics, names=names)
    assert (packed.dtype, packed.requires_grad) == (torch.float32, False)
    found = unpack_sums(packed.flatten().tolist(), names)
    assert found == (3.0, sources or [], {"accuracy": 2.0, "entropy": 0.5} if names else {})
