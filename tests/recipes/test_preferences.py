"""Pairs of answers reach a recipe that asks for them: side by side in a pack, with each target's document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from fsdp2kit.config.data_checks import check_data
from fsdp2kit.config.schema import ChatDataConfig, PreferenceDataConfig, TrainConfig, TrainingConfig
from fsdp2kit.data.documents import Documents, build_documents
from fsdp2kit.data.loader import Share, build_loader
from fsdp2kit.errors import UserError
from tests.data.helpers.templates import make_tokenizer
from tests.support.models import tiny_model
from tests.support.runs import run_recipe
from tests.support.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    {"prompt": f"Question {at}? ", "chosen": "Yes, " * (1 + at % 5), "rejected": "No. " * (1 + at % 3)}
    for at in range(12)
]
OBJECTIVE = '''

import torch
import torch.nn.functional as F


def prefer(model, inputs):
    """softplus(−log p(chosen) + log p(rejected)), summed over pairs."""
    documents, count = inputs.pop("documents"), inputs.pop("num_documents")
    labels, index = inputs.pop("labels").flatten(), inputs.pop("index")
    logits = model(**inputs, use_cache=False).logits.flatten(0, 1)[index].float()
    losses = F.cross_entropy(logits, labels[index], reduction="none")
    answers = losses.new_zeros(count).index_add(0, documents, losses)
    return F.softplus(answers[0::2] - answers[1::2]).sum(), None
'''


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents_of(path: Path, **options: Any) -> Documents:
    section = PreferenceDataConfig(path=str(path), **options)
    return build_documents(section, tokenizer=make_tokenizer(None))


def test_pairs_stay_together_in_packs_of_any_mesh(tmp_path: Path) -> None:
    documents, tokenizer = documents_of(write(tmp_path / "a.jsonl", PAIRS), seq_len=96), make_tokenizer(None)
    texts = [tokenizer.decode(documents[index][0]) for index in range(len(documents))]
    for number, pair in enumerate(PAIRS):
        sides = [f"<|begin|>{pair['prompt']}{pair[name]}<|im_end|>" for name in ("chosen", "rejected")]
        assert texts[2 * number : 2 * number + 2] == sides
    found = []
    for rank in range(2):
        share = Share(96, 4, 2, rank, 2)
        loader = build_loader([documents], share=share, pack=True, shuffle=True, seed=1)
        for index in range(loader.steps_per_epoch):
            for batch in loader.batch(index):
                own = batch.per_target["documents"]
                seen = [one for one in own.unique().tolist() if one >= 0]
                assert seen == list(range(batch.num_documents))
                assert batch.num_items == len(seen) / 2
                ids = [tokenizer.decode(batch.input_ids[own == one]) for one in seen]
                rows = [(own == one).nonzero()[:, 0].unique().tolist() for one in seen]
                assert rows[0::2] == rows[1::2]
                found += zip(ids[0::2], ids[1::2], strict=True)
    assert sorted(found) == sorted(zip(texts[0::2], texts[1::2], strict=True))


@pytest.mark.parametrize("overlong", ["truncate", "drop", "error"])
def test_a_pair_that_is_too_long(overlong: str, tmp_path: Path) -> None:
    long = {"prompt": "Q? ", "chosen": "word " * 40, "rejected": "no"}
    prompt = {"prompt": "asked " * 80, "chosen": "yes", "rejected": "no"}
    path = write(tmp_path / "a.jsonl", [PAIRS[0], long, prompt])
    options = {"seq_len": 64, "overlong": overlong}
    if overlong == "error":
        with pytest.raises(
            UserError, match=r"a\.jsonl:2: \d+ tokens, more than data\.seq_len = 64 \(2 such rows of 3"
        ):
            documents_of(path, **options)
        return
    documents = documents_of(path, **options)
    whole = documents_of(path, seq_len=2048).lengths
    kept = [*whole[:2]] if overlong == "drop" else [*whole[:2], 64 - whole[3], whole[3]]
    assert documents.lengths.tolist() == kept, "a pair without an answer left is no pair"
    report = documents.report
    assert (report.rows, report.truncated + report.dropped) == (3, 2)
    assert report.supervised_tokens == sum(documents[index][1][1:].sum() for index in range(len(documents)))


def test_an_answer_that_is_cut_has_no_end(tmp_path: Path) -> None:
    """Both sides are the beginnings of what they are whole, as TRL cuts them: nobody ended an answer there."""
    long = {"prompt": "Q? ", "chosen": "word " * 40, "rejected": "never " * 40}
    half = {"prompt": "Q? ", "chosen": "word " * 40, "rejected": "no"}
    path = write(tmp_path / "a.jsonl", [PAIRS[0], long, half])
    cut, whole = documents_of(path, seq_len=64), documents_of(path, seq_len=2048)
    assert cut.lengths.sum() < whole.lengths.sum()
    for index in range(len(whole)):
        (ids, mask), (all_ids, all_mask) = cut[index], whole[index]
        assert ids.tolist() == all_ids[: len(ids)].tolist()
        assert mask.tolist() == all_mask[: len(ids)].tolist()
    assert (cut.report.truncated, cut.report.without_end) == (2, 3)
    assert "2 truncated, 3 answers cut, with no end of turn; " in str(cut.report)
    assert cut.report.supervised_tokens == sum(cut[index][1][1:].sum() for index in range(len(cut)))


def expected_losses(model: Any, tokenizer: Any, rows: list[dict]) -> tuple[float, float]:
    """The recipe's mean over pairs and a token's mean cross-entropy, by plain transformers, document by document."""
    total, spent, tokens = 0.0, 0.0, 0
    for row in rows:
        sides = []
        for name in ("chosen", "rejected"):
            coded = tokenizer(row["prompt"] + row[name], return_offsets_mapping=True)
            mask = [end > len(row["prompt"]) for _, end in coded["offset_mapping"]] + [True]
            ids = torch.tensor([*coded["input_ids"], tokenizer.eos_token_id])
            losses = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
            sides.append(losses[torch.tensor(mask[1:])].sum())
            tokens += sum(mask[1:])
        total += F.softplus(sides[0] - sides[1]).item()
        spent += sum(sides).item()
    return total / len(rows), spent / tokens


@pytest.mark.full
@torch.no_grad()
def test_a_recipe_of_ones_own_computes_something_of_each_pair(pool: WorkerPool, tmp_path: Path) -> None:
    sft = (ROOT / "recipes" / "sft.py").read_text()
    changed = sft.replace("ChatDataConfig", "PreferenceDataConfig").replace("=cross_entropy", "=prefer")
    (tmp_path / "mine.py").write_text(changed + OBJECTIVE)
    model, tokenizer = tiny_model("smollm2"), AutoTokenizer.from_pretrained(ROOT / "toml" / "demo" / "tokenizer")
    model.resize_token_embeddings(1024, mean_resizing=False)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    held_out = write(tmp_path / "b.jsonl", PAIRS[:3])
    (tmp_path / "x.toml").write_text(f"""
        recipe = "mine.py"
        model.path = "model"
        fsdp.param_dtype = "float32"
        data = {{ path = "{write(tmp_path / "a.jsonl", PAIRS)}", seq_len = 128 }}
        train = {{ epochs = 1, global_batch_size = 64 }}
        eval = {{ every = 1, path = "{held_out}" }}
        optimizer.lr = 0.0
        checkpoint.export_hf = "never"
        run.dir = "{tmp_path}/run"
        wandb.mode = "disabled"
    """)
    pool.run(2, run_recipe, str(tmp_path / "x.toml"), [])
    [line] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["loss"] == pytest.approx(expected_losses(model, tokenizer, PAIRS)[0], rel=1e-5)
    assert line["eval_loss"] == pytest.approx(expected_losses(model, tokenizer, PAIRS[:3])[1], rel=1e-5)


def test_other_recipes_refuse_them_still(tmp_path: Path) -> None:
    path = str(tmp_path / "a.jsonl")
    asked = TrainingConfig.model_construct(recipe="x", data=PreferenceDataConfig(path=path))
    check_data(asked)
    with pytest.raises(UserError, match="two answers a row"):
        check_data(asked.model_copy(update={"data": ChatDataConfig(path=path, format="preference")}))
    mixed = PreferenceDataConfig.model_validate({"sources": [{"path": path}, {"path": path, "format": "chat"}]})
    with pytest.raises(UserError, match="give pairs alone"):
        check_data(asked.model_copy(update={"data": mixed}))
    train = TrainConfig(steps=1)
    streamed = asked.model_copy(update={"data": PreferenceDataConfig(path=path, streaming=True), "train": train})
    with pytest.raises(UserError, match="does not keep the two answers"):
        check_data(streamed)
