"""What the model answers to a few questions, while it is trained and wherever it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fsdp2kit.config.schema import EvalConfig
from fsdp2kit.data.batch import Batch
from fsdp2kit.data.tokens import special_ids
from fsdp2kit.distributed import sum_over_ranks
from fsdp2kit.errors import UserError
from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.parallel.mesh import Mesh

_BLOCK = 64  # rows grow by so many tokens, so that a compiled model meets few lengths


def build_sampler(
    section: EvalConfig,
    model: Any,
    *,
    tokenizer: Any,
    to_device: Callable[[Any], dict[str, Any]],
    mesh: Mesh,
    log: Callable[[int, list[dict[str, Any]]], None],
) -> Callable[[int], None]:
    """A function that lets the model answer ``eval.prompts`` and logs ``{"prompt", "answer"}`` under a step.

    Args:
        tokenizer: with a chat template the prompts are user messages, without one the beginnings of a text.
        to_device: as the loop's.
        log: called on every rank.

    Raises:
        UserError: there are prompts and no tokenizer.
    """
    if not section.prompts:
        return lambda step: None
    if tokenizer is None:
        raise UserError("eval.prompts", "need a tokenizer", "set model.tokenizer or model.path, or leave them out")
    rows = [_prompt_ids(tokenizer, prompt) for prompt in section.prompts]
    stops = special_ids(tokenizer)

    def sample(step: int) -> None:
        answers = [
            generate(model, ids, to_device, max_new_tokens=section.max_new_tokens, stops=stops, mesh=mesh)
            for ids in rows
        ]
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        pairs = zip(section.prompts, texts, strict=True)
        log(step, [{"prompt": prompt, "answer": answer.strip()} for prompt, answer in pairs])

    return sample


@torch.no_grad()
def generate(
    model: Any,
    prompt: Sequence[int],
    to_device: Callable[[Any], dict[str, Any]],
    *,
    max_new_tokens: int,
    stops: Collection[int],
    mesh: Mesh,
) -> list[int]:
    """Greedy continuation of ``prompt``, without a cache: a whole forward pass a token. Collective.

    Every rank runs the same row, or with context parallelism its part of it; one of them decides.
    """
    model.eval()
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        unit = _BLOCK * mesh.sizes.cp
        row = torch.zeros((1, -(-len(tokens) // unit) * unit), dtype=torch.int64)
        row[0, : len(tokens)] = torch.tensor(tokens)
        # The row is one document: what stands behind a token does not reach it.
        batch = Batch(row, torch.full_like(row, -100), torch.arange(row.numel())[None], 0, len(tokens), 0)
        inputs = to_device(batch)
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "index")}
        logits = model(**inputs, use_cache=False).logits
        owner, place = divmod(len(tokens) - 1, logits.shape[1])
        decides = mesh.cp_rank == owner and mesh.dp_rank == 0
        chosen = int(sum_over_ranks([float(logits[0, place].argmax()) if decides else 0.0])[0])
        tokens.append(chosen)
        if chosen in stops:
            break
    reshard_all(model)
    model.train()
    return tokens[len(prompt) :]


def _prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
