"""What drops values in training drops none in an evaluation, an answer or a reference: all are plain transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp2kit.config.schema import EvalConfig, LoraConfig, PreflightConfig
from fsdp2kit.job import distributed
from fsdp2kit.objectives.reference import build_reference
from fsdp2kit.parity.engine import RankBatches, Sharded
from fsdp2kit.parity.reference import cross_entropy_sum, load_plain, plain_logits
from fsdp2kit.train.evaluation import build_evaluation, generate
from tests.support.cases import Case
from tests.support.models import make_batches, make_rows, tiny_model_dir
from tests.support.workers import WorkerPool

DROPOUT, PROMPT, NEW = 0.5, [5, 17, 99, 3, 42], 8
HELD_OUT, EVALUATED = 3, 2  # batches


def outcomes(folder: Path, lora: LoraConfig) -> dict[str, Any]:
    """What a model in training, of which attention drops half, comes to where it does not train."""
    config = Case("llama3").config(folder, steps=1, rows=4)
    model = config.model.model_copy(update={"config": {"attention_dropout": DROPOUT}})
    allowed = {"preflight": PreflightConfig(allow=["dropout"]), "eval": EvalConfig(steps=EVALUATED)}
    sharded = Sharded(config.model_copy(update={"model": model, "lora": lora, **allowed}), world=distributed.start())
    model, built = sharded.model, {"plan": sharded.plan, "mesh": sharded.mesh}
    reference = build_reference(sharded.config, model, **built)
    evaluation = build_evaluation(
        sharded.config.eval, model, {"": RankBatches(make_batches(HELD_OUT, seed=5), 1)}, **built
    )
    assert evaluation is not None
    inputs, found = sharded.inputs(make_rows(1).as_batch()), {}
    with torch.no_grad():
        found["training"] = [model.token_log_probs(**inputs)[0].numpy() for _ in range(2)]
    found["reference"] = reference.token_log_probs(**inputs)[0].numpy()
    found["eval_loss"] = evaluation()["eval_loss"]
    found["answer"] = generate(model, PROMPT, max_new_tokens=NEW, stops=(), **built)
    found["is copy"] = not reference.is_trained
    assert model.training
    return found


@pytest.mark.parametrize("rank", [None, 2], ids=["a copy is the reference", "adapters are switched off"])
def test_nothing_is_dropped_beside_training(rank: int | None, pool: WorkerPool, tmp_path: Path) -> None:
    plain = load_plain(tiny_model_dir("llama3", tmp_path)).eval()
    [found] = pool.run(1, outcomes, tmp_path, LoraConfig(rank=rank))
    assert found["is copy"] is (rank is None)
    one, other = found["training"]
    assert np.abs(one - other).max() > 0.1, "in training it is dropped, or this would prove nothing"
    rows, held_out = make_rows(1), make_batches(HELD_OUT, seed=5)[:EVALUATED]
    with torch.no_grad():
        logs, supervised = plain_logits(plain, rows).log_softmax(-1), rows.labels != -100
        expected = logs[supervised].gather(1, rows.labels[supervised][:, None]).squeeze(1)
        total = sum(cross_entropy_sum(plain_logits(plain, batch).double(), batch.labels).item() for batch in held_out)
        tokens = plain.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :]
    np.testing.assert_allclose(found["reference"], expected.numpy(), rtol=1e-5, atol=1e-5)
    assert found["eval_loss"] == pytest.approx(total / sum(batch.targets for batch in held_out), rel=1e-6)
    assert found["answer"] == tokens.tolist()
