"""Which types of models can be packed, cut over ranks, adapted: decided by what checks every run, on small copies.

fsdp2kit models                        # a table of the families that people train now; a minute
fsdp2kit models --all                  # of all decoders that transformers has; minutes
fsdp2kit models TYPE …                 # these model types, with the reasons
fsdp2kit models --write docs/models.md # the table, below the first lines of that file
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from fsdp2kit.checkpoint.export_model import export_model
from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import ModelConfig, TrainingConfig
from fsdp2kit.config.sections.rollout import RolloutConfig
from fsdp2kit.console import in_one_line, show, user_path
from fsdp2kit.errors import UserError, did_you_mean
from fsdp2kit.model.build import build_model, materialize
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.model.inspect import Traits, inspect_model, shrink_config
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.rl.engines.engine import Request
from fsdp2kit.rl.engines.transformers_engine import TransformersEngine
from fsdp2kit.weights.initialize import initialize

COLUMNS = ("one document a row", "packed", "Ulysses", "ring", "allgather", "LoRA", "QLoRA", "export", "generation")
EXACT = "exact"
MARK = "<!-- fsdp2kit models -->\n"
"""The line of docs/models.md below which the table stands."""

FAMILIES = (
    *("apertus", "bamba", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "exaone4", "falcon_h1"),
    *("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "glm4_moe", "glm_moe_dsa", "gpt_oss"),
    *("granitemoehybrid", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "lfm2", "lfm2_moe", "llama", "llama4_text"),
    *("longcat_flash", "mamba2", "minimax", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral"),
    *("nemotron", "nemotron_h", "olmo3", "olmoe", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
    *("smollm3", "starcoder2"),
)
"""The model types of docs/models.md: those that people train now."""

# What published configs say where a type's default config has another kind of layers, or none that can be built.
_CONVOLUTION = {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4}
_MAMBA = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {
        **{"topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6},
        "q_lora_rank": None,
    },
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 1},
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}

# A default config may have what a run must be told to allow, and what no trained checkpoint has.
_ALLOWED = {"preflight": {"allow": ["dropout", "router_aux_loss"]}, "data": {"seq_len": 128}}


def decoder_types() -> list[str]:
    """The model types that transformers has a causal language model for."""
    return sorted(name for name, kind in CONFIG_MAPPING.items() if kind in MODEL_FOR_CAUSAL_LM_MAPPING)


def row_of(model_type: str) -> dict[str, str] | str:
    """A cell for each of `COLUMNS`, `EXACT` or why it is refused; a single reason where there is no such model."""
    section = ModelConfig(config={"model_type": model_type, **_PUBLISHED.get(model_type, {})}, weights="random")
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            hf_config = load_hf_config(section)
            with contextlib.suppress(Exception):  # what does not shrink is taken as it is, which is only slower
                shrink_config(hf_config, keep_heads=True).save_pretrained(folder)
                small = ModelConfig(path=folder, weights="random")
                build_model(small)
                section = small
            model = build_model(section)
            return dict(_cells(model, inspect_model(model), section))
        except Exception as error:  # transformers may raise anything for a default config
            return _reason(error, model_type)


def _cells(model: PreTrainedModel, traits: Traits, section: ModelConfig) -> Iterator[tuple[str, str]]:
    name = type(model).__name__

    def decide(
        values: Mapping[str, Any], *, cp: int = 1, of: Callable[[Any], PreTrainedModel] = lambda _: model
    ) -> str:
        config = TrainingConfig.model_validate({"recipe": "none", "model": section.model_dump(), **_ALLOWED, **values})
        try:
            adapted = of(config)
            plan_parallel(adapted, config, MeshSizes(1, 1, cp), traits=traits if adapted is model else None)
        except Exception as error:
            return _reason(error, name)
        return EXACT

    def data(pack: bool) -> dict[str, Any]:
        return {"data": {"seq_len": 128, "pack": pack}}

    yield COLUMNS[0], decide(data(pack=False))
    packed = decide(data(pack=True))
    yield COLUMNS[1], packed
    for column in COLUMNS[2:5]:
        values = {**data(pack=packed == EXACT), "context_parallel": {"method": column.lower()}, "mesh": {"cp": 2}}
        yield column, decide(values, cp=2)
    for column, quantize in zip(COLUMNS[5:7], ("none", "nf4"), strict=True):
        values = {**data(pack=packed == EXACT), "lora": {"rank": 8, "quantize": quantize}}
        yield column, decide(values, of=lambda config: build_model(section, lora=config.lora))
    for column, attempt in zip(COLUMNS[7:], (_try_export, _try_generation), strict=True):
        try:
            yield column, attempt(_with_values(section))
        except Exception as error:
            yield column, _reason(error, name)


@torch.no_grad()
def _with_values(section: ModelConfig) -> Any:
    """A model of random numbers, in evaluation mode."""
    model = build_model(section)
    materialize(model, device=torch.device("cpu"))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    return model.eval()


def _try_export(model: Any) -> str:
    """Whether transformers reads an export as the model that it was, bit for bit."""
    with TemporaryDirectory() as folder:
        export_model(model, folder + "/hf", dtype="float32")
        loaded = type(model).from_pretrained(folder + "/hf", dtype=torch.float32).state_dict()
    differing = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, loaded[name])]
    return f"{differing[0]} comes back with other values" if differing else EXACT


@torch.no_grad()
def _try_generation(model: Any) -> str:
    """Whether the log-probabilities of rollouts in one batch are those of each prompt with its response alone.

    The model's matrices are larger than when training begins, so that tokens matter to each other.
    """
    with contextlib.suppress(UserError):  # a model whose class leaves some values out: these stay random
        initialize(model, seed=0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.5 * parameter.shape[-1] ** -0.5)
    vocabulary = model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary, (length,), generator=draw).tolist() for length in (1, 3, 9, 40)]
    engine = TransformersEngine(RolloutConfig(), model, stops=[0], pad_id=0)
    requests = [Request(ids, (number,)) for number, ids in enumerate(prompts)]
    for ids, response in zip(prompts, engine.generate(requests, max_new_tokens=12, temperature=1.0), strict=True):
        logits = model(input_ids=torch.tensor([[*ids, *response.ids]]), use_cache=False).logits[0, len(ids) - 1 : -1]
        alone = logits.log_softmax(-1).gather(1, torch.tensor(response.ids)[:, None]).squeeze(1)
        if (alone - torch.tensor(response.log_probs)).abs().max() > 1e-4:
            return "log-probabilities of responses in a batch are not those of each alone"
    return EXACT


def _reason(error: Exception, name: str) -> str:
    """A refusal's text without the model's name, so that equal ones share a note; other errors are marked as such."""
    if isinstance(error, UserError):
        what = error.what.replace(f"{name}: ", "").replace(name, "the model")
    else:
        what = (
            f"an error, not a refusal: {type(error).__name__}: {textwrap.shorten(str(error), 120, placeholder=' …')}"
        )
    what = re.sub(r" \([\w.]+, …\)", "", what)  # one of many modules
    return re.sub(r"\s+", " ", what).replace("|", "\\|")


def table(model_types: Iterable[str] = FAMILIES) -> str:
    """The Markdown table of these model types, as it stands in docs/models.md."""
    logging.disable(logging.WARNING)
    try:
        return as_markdown({model_type: row_of(model_type) for model_type in model_types})
    finally:
        logging.disable(logging.NOTSET)


def as_markdown(rows: Mapping[str, dict[str, str] | str]) -> str:
    """A line a model type, with reasons as notes, and what could not be built."""
    notes: dict[str, int] = {}

    def cell(text: str) -> str:
        return text if text == EXACT else f"refused: {notes.setdefault(text, len(notes) + 1)}"

    lines = ["| model type | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    for model_type, row in rows.items():
        if not isinstance(row, str):
            lines.append(f"| `{model_type}` | " + " | ".join(cell(row[column]) for column in COLUMNS) + " |")
    lines += ["", "Why:", "", *(f"{number}. {text}" for text, number in notes.items())]
    if unbuilt := {model_type: row for model_type, row in rows.items() if isinstance(row, str)}:
        lines += ["", "Not built from their default configs:", ""]
        lines += [f"- `{model_type}`: {row}" for model_type, row in unbuilt.items()]
    return "\n".join(lines) + "\n"


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    options = _parse(arguments)
    for model_type in options.types:
        _check_known(model_type)
    for model_type in options.types:
        row = row_of(model_type)
        cells = {"not built": row} if isinstance(row, str) else row
        show(f"{model_type}:", *(f"  {column}: {cell}" for column, cell in cells.items()), sep="\n")
    model_types = decoder_types() if options.all else FAMILIES
    if options.write is not None:
        text = Path(options.write).read_text(encoding="utf-8")
        Path(options.write).write_text(text[: text.index(MARK)] + MARK + table(model_types), encoding="utf-8")
    elif not options.types:
        show(table(model_types), end="")
    return 0


def _check_known(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        what = f"transformers {transformers.__version__} has no model type of this name"
        todo = did_you_mean(model_type, decoder_types(), otherwise="`fsdp2kit models --all` shows those it has")
        raise UserError(model_type, what, todo)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fsdp2kit models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="transformers' model_type; default: a table")
    parser.add_argument("--all", action="store_true", help="all decoders that transformers has")
    parser.add_argument(
        "--write", type=user_path, metavar="FILE", help=f"write the table below the line {MARK.strip()}"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
