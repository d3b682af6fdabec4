"""DPO, IPO, SimPO and ORPO are TRL's, on any mesh, packed or not, in any micro-batches; the reference is frozen."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from fsdp2kit.config.schema import CompileConfig, EvalConfig
from fsdp2kit.config.sections.dpo import PlainDPOConfig, SimPOConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.data.documents import Document, build_documents
from fsdp2kit.job import distributed
from fsdp2kit.objectives.preference import Preference
from fsdp2kit.objectives.reference import ReferenceModel, build_reference
from fsdp2kit.parity.engine import Sharded, whole
from fsdp2kit.parity.reference import gradient_distances, gradient_of, load_plain, plain_logits
from fsdp2kit.torch_compat import parameter_groups
from fsdp2kit.train.evaluation import build_evaluation
from fsdp2kit.train.step import MetricNames, accumulate_gradients, next_batch
from fsdp2kit.weights.load import load_pretrained
from recipes import dpo
from tests.objectives.helpers import Outcome, trl_outcome
from tests.support.cases import Case, counted_compilations
from tests.support.models import demo_model_dir, full, make_rows, tiny_model_dir, write_adapter
from tests.support.workers import WorkerPool

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
    """The reference, the model that is trained, not far from it, and pairs."""
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
        objective = Preference(config.dpo, reference if config.dpo.needs_reference else None, mesh)
        names = MetricNames()
        batch = next_batch(loader, 0, mesh=mesh)
        assert batch.num_items == len(PAIRS)
        assert len(batch.micro_batches) == 8 // micro // mesh.sizes.dp
        total = accumulate_gradients(
            model, batch, objective=objective, names=names, shard=sharded.inputs, fsdp=config.fsdp
        )
        loss, *metrics = mesh.sum_loss(total).tolist()
        gradients = {name: whole(gradient_of(p)).numpy().copy() for name, p in model.named_parameters()}
        model.zero_grad()
        found.append(Outcome(loss, gradients, dict(zip(names.names, metrics, strict=True))))
    assert all(parameter.grad is None for parameter in reference.model.parameters())
    return found


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    models, scratch = (folder / "policy", folder / "reference"), tmp_path_factory.mktemp("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: trl_outcome(*models, documents_of(folder, name), options, scratch)
            for name, options in LOSSES.items()
        }


def documents_of(folder: Path, name: str) -> list[Document]:
    section = config_of(folder, name).data
    documents = build_documents(section, tokenizer=AutoTokenizer.from_pretrained(folder / "reference"))
    return [documents[at] for at in range(len(documents))]


@torch.no_grad()
def plain_metrics(folder: Path, name: str) -> dict[str, float]:
    """Means over pairs by plain transformers, of answers' means over tokens."""
    models, sides = [load_plain(folder / kind).eval() for kind in ("policy", "reference")], []
    for ids, supervised in documents_of(folder, name):
        targets = torch.from_numpy(ids)
        logs = [model(targets[None], use_cache=False).logits[0, :-1].double().log_softmax(-1) for model in models]
        policy, reference = (log.gather(1, targets[1:, None]).squeeze(1)[supervised[1:]] for log in logs)
        sides.append((policy.mean(), policy - reference))
    beta = LOSSES[name]["beta"]
    chosen, rejected = ([beta * ratios.mean() for _, ratios in sides[at::2]] for at in (0, 1))
    pairs = [torch.cat([one, other]) for (_, one), (_, other) in zip(sides[0::2], sides[1::2], strict=True)]
    found = {
        "kl": [ratios.square().mean() / 2 for ratios in pairs],
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": [one - other for one, other in zip(chosen, rejected, strict=True)],
        "rewards/accuracies": [(one > other).double() for one, other in zip(chosen, rejected, strict=True)],
        "logps/chosen": [mean for mean, _ in sides[0::2]],
        "logps/rejected": [mean for mean, _ in sides[1::2]],
    }
    return {metric: torch.stack(values).mean().item() for metric, values in found.items()}


VARIANTS = [(name, micro, pack) for name in LOSSES for micro, pack in ((1, True), (2, False))]


@pytest.mark.parametrize(
    ("world", "cp"), [(2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1), (2, 1), (4, 2)))]
)
def test_losses_and_gradients_are_trls(
    world: int, cp: int, folder: Path, expected: dict[str, Outcome], pool: WorkerPool
) -> None:
    plain = {name: plain_metrics(folder, name) for name in ("dpo", "smoothed", "ipo")}
    found = pool.run(world, outcomes, folder, cp, VARIANTS)[0]
    for (name, micro, pack), ours in zip(VARIANTS, found, strict=True):
        trl = expected[name]
        case = f"{name} micro {micro} pack {pack}"
        assert ours.loss == pytest.approx(trl.loss, rel=1e-5), case
        distances = gradient_distances(ours.gradients, trl.gradients)
        assert max(distances.values()) < 1e-5, case
        assert min(np.abs(gradient).max() for gradient in trl.gradients.values()) > 0
        assert ("kl" in ours.metrics) == (name in ("dpo", "smoothed", "ipo"))
        for metric, value in ours.metrics.items():
            # TRL has no such distance, and its rewards of IPO are sums, though its loss is of means over tokens.
            known = plain[name] if metric == "kl" or name == "ipo" else trl.metrics
            # Rewards may be near 0, and are differences of log-probabilities of about 64, which float32 has to 8e-6.
            assert value == pytest.approx(known[NAMES.get(metric, metric)], rel=1e-4, abs=4e-6), f"{case} {metric}"


def beside_peft(folder: Path, case: Case) -> dict[str, Any]:
    """Log-probabilities with adapters off and on, with their squared difference's gradients; and of the reference."""
    config = case.config(folder, steps=1, rows=4)
    sharded = Sharded(config, world=distributed.start())
    model, inputs = sharded.model, sharded.inputs(make_rows(1).as_batch())
    reference = build_reference(config, model, plan=sharded.plan, mesh=sharded.mesh)
    began, _ = reference.token_log_probs(**inputs)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    off, _ = ReferenceModel(model, is_trained=True).token_log_probs(**inputs)
    assert not off.requires_grad
    assert model.training
    on, _ = model.token_log_probs(**inputs)
    # Both ranks have all rows, and gradients add up over ranks.
    ((on - off).square().sum() / distributed.world_size()).backward()
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = {name: whole(p.grad).numpy().copy() for name, p in model.named_parameters() if p.requires_grad}
    return {"off": off.numpy(), "on": on.detach().numpy(), "began": began.numpy(), "gradients": gradients}


@pytest.mark.parametrize("adapter", ["lora", full("dora"), full("saved")])
def test_an_adapter_is_switched_off_as_by_peft(adapter: str, pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model_dir("llama3", tmp_path)
    write_adapter(tmp_path, "llama3", adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(
            load_plain(tmp_path / "llama3"), tmp_path / f"llama3-{adapter}", is_trainable=True
        )
    rows = make_rows(1)

    def log_probs() -> torch.Tensor:
        logits = plain_logits(model.get_base_model(), rows).log_softmax(-1)
        supervised = rows.labels != -100
        return logits[supervised].gather(1, rows.labels[supervised][:, None]).squeeze(1)

    with model.disable_adapter(), torch.no_grad():
        off = log_probs()
    on = log_probs()
    (on - off).square().sum().backward()
    gradients = {name: p.grad.numpy() for name, p in model.get_base_model().named_parameters() if p.requires_grad}
    assert (on - off).abs().max() > 0.1
    for found in pool.run(2, beside_peft, tmp_path, Case("llama3", 2, adapter=adapter)):
        np.testing.assert_allclose(found["off"], off.numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["on"], on.detach().numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["began"], on.detach().numpy(), rtol=1e-5, atol=1e-5)
        assert max(gradient_distances(found["gradients"], gradients).values()) < 1e-5


def copy_in_bfloat16(folder: Path) -> None:
    """A copy takes bf16 shards, its values are those that the model computes with, and it keeps nothing gathered."""
    fsdp = {"param_dtype": "bfloat16", "strategy": "shard_grad_op"}
    config = config_of(folder, "dpo", fsdp=fsdp, activation_checkpointing={"mode": "full"})
    sharded = Sharded(config, world=distributed.start())
    model, mesh = sharded.model, sharded.mesh
    reference = build_reference(config, model, plan=sharded.plan, mesh=mesh)
    tokenizer = AutoTokenizer.from_pretrained(folder / "reference")
    batch = next_batch(build_data(config, tokenizer=tokenizer, model=model, mesh=mesh).loader, 0, mesh=mesh)
    objective = Preference(config.dpo, reference, mesh)
    for micro in batch.micro_batches:
        loss, _, metrics = objective(model, sharded.inputs(micro))
        loss.backward()
        assert loss.item() == pytest.approx(math.log(2) * micro.num_items, rel=1e-6)
        assert metrics["kl"] == metrics["margin"] == 0, "bit for bit what the model itself computes"
    for parameter in reference.model.parameters():
        assert isinstance(parameter, DTensor), "nothing is left gathered"
        assert parameter.grad is None
        assert parameter.to_local().dtype == torch.bfloat16
        rows = -(-len(parameter) // mesh.shard.size())
        assert len(parameter.to_local()) <= rows
    for unit in (module for module in reference.model.modules() if isinstance(module, FSDPModule)):
        assert not any(group.comm_ctx.post_forward_order for group in parameter_groups(unit))


def test_a_copy_is_frozen_sharded_and_small(folder: Path, pool: WorkerPool) -> None:
    pool.run(2, copy_in_bfloat16, folder)


def compiled(folder: Path, case: Case) -> tuple[list[int], float]:
    """Compilations after each of three passes, of the model and of it without its adapters; how far off they are."""
    rows, config = make_rows(1).as_batch(), case.config(folder, steps=1, rows=4)
    plain = Sharded(config, world=distributed.start())
    expected = [method(**plain.inputs(rows))[0] for method in _both(plain.model)]
    counts, furthest = [], 0.0
    with counted_compilations() as compilations:
        config = config.model_copy(update={"compile": CompileConfig(enabled=True)})
        sharded = Sharded(config, world=distributed.start())
        for _ in range(3):
            off, on = (method(**sharded.inputs(rows))[0] for method in _both(sharded.model))
            (on - off).sum().backward()
            furthest = max(
                furthest, *((one - two).abs().max().item() for one, two in zip((off, on), expected, strict=True))
            )
            counts.append(len(compilations))
    return counts, furthest


def _both(model: Any) -> tuple[Any, Any]:
    return ReferenceModel(model, is_trained=True).token_log_probs, model.token_log_probs


@pytest.mark.full
def test_compiled_layers_are_switched_without_compiling_again(pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model_dir("llama3", tmp_path)
    write_adapter(tmp_path, "llama3", "lora")
    [(counts, furthest)] = pool.run(1, compiled, tmp_path, Case("llama3", adapter="lora"))
    assert counts[0] > 0
    assert counts == [counts[0]] * 3
    assert furthest < 1e-4


def test_what_a_held_out_loss_depends_on_is_named() -> None:
    """Losses by another β are not compared when a run is resumed."""

    def measured(kind: Any = PlainDPOConfig, **keys: Any) -> dict[str, str]:
        model, one = SimpleNamespace(config=None), SimpleNamespace(fingerprint="rows")
        objective = Preference(kind(**keys), None, None)  # pyright: ignore[reportArgumentType]
        built: Any = {"plan": None, "mesh": None, "objective": objective}
        found = build_evaluation(EvalConfig(), model, {"": one}, **built)  # pyright: ignore[reportArgumentType]
        assert found is not None
        return dict(found.measured_by)

    plain = measured()
    assert plain == {"held-out rows": "rows", "eval.steps": "None", "dpo.beta": "0.1", "dpo.label_smoothing": "0.0"}
    assert measured(beta=0.1) == plain
    assert measured(beta=0.2) != plain
    assert measured(SimPOConfig, loss="simpo") != measured(SimPOConfig, loss="simpo", gamma=3.0)
