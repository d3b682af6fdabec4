"""DPO, IPO, SimPO and ORPO are TRL's, on any mesh, packed or not, in any micro-batches; the reference is frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from fsdp2kit import distributed
from fsdp2kit.config.schema import DPOConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.data.documents import Document, build_documents
from fsdp2kit.model.weights import load_pretrained
from fsdp2kit.objectives.preference import Preference
from fsdp2kit.objectives.reference import build_reference
from fsdp2kit.parity.engine import Sharded, whole
from fsdp2kit.parity.reference import gradient_distances, gradient_of, load_plain
from fsdp2kit.train.step import Measured, accumulate_gradients, next_batch
from recipes import dpo
from tests.objectives.trl_side import Outcome, trl_outcome
from tests.reference import demo_model_dir
from tests.workers import WorkerPool

PAIRS = [
    {"prompt": f"Question {at}? ", "chosen": "Yes, " * (1 + at % 5), "rejected": "No. " * (1 + at % 3)}
    for at in range(8)
]
# TRL's ORPO learns prompts, too; of a prompt of one token there is nothing to learn.
SHORT = [{**pair, "prompt": "Q", "chosen": f" {pair['chosen']}", "rejected": f" {pair['rejected']}"} for pair in PAIRS]
LOSSES = {
    "dpo": {"loss": "dpo", "beta": 0.3},
    "smoothed": {"loss": "dpo", "beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.2},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.7},
    "orpo": {"loss": "orpo", "beta": 0.4},
}
NAMES = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}  # TRL's, where ours are others


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference, the model that is trained (not far from it), and pairs."""
    path = tmp_path_factory.mktemp("preferences")
    reference = demo_model_dir(path / "reference")
    model: Any = load_plain(reference)
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(path / "policy")
    AutoTokenizer.from_pretrained(reference).save_pretrained(path / "policy")
    for name, rows in (("pairs", PAIRS), ("short", SHORT)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(folder: Path, name: str, *, micro: int = 1, pack: bool = True, **sections: Any) -> dpo.Config:
    data = {"path": str(folder / ("short.jsonl" if name == "orpo" else "pairs.jsonl")), "seq_len": 96, "pack": pack}
    return dpo.Config.model_validate(
        {
            "recipe": "dpo",
            "model": {"path": str(folder / "reference")},
            "fsdp": {"param_dtype": "float32"},
            "data": {**data, "shuffle": False, "workers": 0},
            "dpo": LOSSES[name],
            "train": {"steps": 1, "global_batch_size": 8, "micro_batch_size": micro},
            **sections,
        }
    )


def outcomes(folder: Path, cp: int, variants: list[tuple[str, int, bool]]) -> list[Outcome]:
    """The loss, gradients and metrics of each loss on a mesh; the model that is trained is not the reference."""
    start = config_of(folder, "dpo", mesh={"cp": cp})
    sharded = Sharded(start, world=distributed.start())
    model, mesh = sharded.model, sharded.mesh
    reference = build_reference(start, model, plan=sharded.plan, mesh=mesh)
    load_pretrained(model, folder / "policy")
    found = []
    for name, micro, pack in variants:
        config = config_of(folder, name, micro=micro, pack=pack, mesh={"cp": cp})
        tokenizer = AutoTokenizer.from_pretrained(folder / "reference")
        loader = build_data(config, tokenizer=tokenizer, model=model, mesh=mesh).loader
        objective = Measured(Preference(config.dpo, reference if config.dpo.needs_reference else None, mesh))
        batch = next_batch(loader, 0, mesh=mesh)
        assert batch.num_items == len(PAIRS)
        assert len(batch.micro_batches) == 8 // micro // mesh.sizes.dp
        total = accumulate_gradients(
            model, batch, objective=objective, shard=sharded.inputs, fsdp=config.fsdp, mesh=mesh
        )
        loss, *metrics = mesh.sum_loss(total).tolist()
        gradients = {name: whole(gradient_of(p)).numpy().copy() for name, p in model.named_parameters()}
        model.zero_grad()
        found.append(Outcome(loss, gradients, dict(zip(objective.names, metrics, strict=True))))
    assert all(parameter.grad is None for parameter in reference.model.parameters())
    return found


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    found = {}
    for name, options in LOSSES.items():
        documents = documents_of(folder, name)
        scratch = tmp_path_factory.mktemp("trl")
        found[name] = trl_outcome(folder / "policy", folder / "reference", documents, options, scratch)
    return found


def documents_of(folder: Path, name: str) -> list[Document]:
    section = config_of(folder, name).data
    documents = build_documents(section, tokenizer=AutoTokenizer.from_pretrained(folder / "reference"))
    return [documents[at] for at in range(len(documents))]


VARIANTS = [(name, micro, pack) for name in LOSSES for micro, pack in ((1, True), (2, False))]


@pytest.mark.parametrize(("world", "cp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_losses_and_gradients_are_trls(
    world: int, cp: int, folder: Path, expected: dict[str, Outcome], pool: WorkerPool
) -> None:
    found = pool.run(world, outcomes, folder, cp, VARIANTS)[0]
    for (name, micro, pack), ours in zip(VARIANTS, found, strict=True):
        trl = expected[name]
        case = f"{name} micro {micro} pack {pack}"
        assert ours.loss == pytest.approx(trl.loss, rel=1e-5), case
        distances = gradient_distances(ours.gradients, trl.gradients)
        assert max(distances.values()) < 1e-5, case
        assert min(np.abs(gradient).max() for gradient in trl.gradients.values()) > 0
        assert ("kl" in ours.metrics) == (name in ("dpo", "smoothed", "ipo"))
        if name == "ipo":  # its rewards are means over tokens here, as its loss is; TRL logs sums
            continue
        for metric in set(ours.metrics) - {"kl"}:
            assert ours.metrics[metric] == pytest.approx(trl.metrics[NAMES.get(metric, metric)], rel=1e-4), metric
