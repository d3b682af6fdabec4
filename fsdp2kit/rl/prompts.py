"""The prompts of ``[data]``, and the order in which they are asked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.console import counted
from fsdp2kit.data.cache import Cache
from fsdp2kit.data.columns import content_key
from fsdp2kit.data.contents import Content, content_of
from fsdp2kit.data.findings import Findings
from fsdp2kit.data.held_out import hold_out
from fsdp2kit.data.loader import permutation
from fsdp2kit.data.rows import RowReader
from fsdp2kit.data.sources import RowSet, held_out_sets, locate
from fsdp2kit.data.template import settle_day
from fsdp2kit.data.tokens import Prompt, encode_prompts
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import agreement
from fsdp2kit.model.tokenizer import turn_ends
from fsdp2kit.rl.rewards.rewards import columns_of


@dataclass(frozen=True)
class Question:
    """What a response is asked for."""

    prompt: Prompt
    seed: tuple[int, ...]
    """With the prompt and the weights, it decides what is sampled."""


@dataclass(frozen=True)
class Prompts:
    """All prompts, on every rank, in an order that depends neither on the mesh nor on the number of steps."""

    prompts: Sequence[Prompt]
    fingerprint: str
    """Digest of the rows and of their tokens."""
    per_round: int
    """Prompts in a batch of rollouts."""
    updates: int
    """Steps on each batch of rollouts."""
    seed: int
    shuffle: bool
    total_steps: int
    """Steps of the whole run: `train.steps`, or those of `train.epochs`."""
    endings: frozenset[int]
    """Tokens that end a turn of the model."""
    pad_id: int = 0
    """The token that packs are padded with."""
    dropped: int = 0
    """Prompts left out because they are too long."""
    held_out: Sequence[Prompt] = ()
    """Prompts of the evaluation, which training never asks."""
    held_out_fingerprint: str = ""
    """Digest of `held_out`."""
    contents: Mapping[str, Content] = field(default_factory=dict)
    """By TOML key, each set of rows that was read."""
    warnings: Sequence[str] = ()
    """What a person should look at before training."""
    notes: Sequence[str] = ()
    """What was done with the rows, a line each."""

    @property
    def columns(self) -> Collection[str]:
        """The keywords that reward functions are called with."""
        return columns_of(prompt.row for prompt in (*self.prompts, *self.held_out))

    @property
    def steps_per_epoch(self) -> float:
        """Steps until every prompt is asked once."""
        return len(self.prompts) / self.per_round * self.updates

    def of_round(self, number: int) -> list[int]:
        """Indices of the prompts of a batch of rollouts, which may span two passes over the prompts."""
        found = []
        count = len(self.prompts)
        for position in range(number * self.per_round, (number + 1) * self.per_round):
            epoch, at = divmod(position, count)
            found.append(int(permutation(count, self.seed, 1 + epoch)[at]) if self.shuffle else at)
        return found

    def statistics(self) -> dict[str, Any]:
        """What was read, as plain values; lengths are in tokens, and 0 where an environment makes the prompts."""
        lengths = sorted(len(prompt.ids) for prompt in self.prompts)
        shown = {"shortest": lengths[0], "median": lengths[len(lengths) // 2], "longest": lengths[-1]}
        counts = {"prompts": len(lengths), "dropped": self.dropped, "held_out": len(self.held_out)}
        return {**counts, "lengths": shown, "steps_per_epoch": self.steps_per_epoch}

    def describe(self) -> list[str]:
        """What the user should know about the prompts before training, line by line."""
        lengths = sorted(len(prompt.ids) for prompt in self.prompts)
        dropped = f"; {counted(self.dropped, 'prompt')} dropped: too long" if self.dropped else ""
        if lengths[-1]:
            what = f"{counted(len(lengths), 'prompt')} of {lengths[0]} to {lengths[-1]} tokens, median "
            what += f"{lengths[len(lengths) // 2]}{dropped}"
        else:
            what = f"{counted(len(lengths), 'row')} for the environment"
        held_out = [f"held out: {counted(len(self.held_out), 'prompt')}"] if self.held_out else []
        return [
            f"data: {what}",
            f"an epoch: {self.steps_per_epoch:.1f} steps; a batch of rollouts: {counted(self.per_round, 'prompt')}",
            *held_out,
            *(f"warning: {text}" for text in self.warnings),
            *self.notes,
        ]


@agreement()
def build_prompts(config: RLConfig, *, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Read the prompts. Collective.

    Raises:
        UserError: a row is malformed, or too long under ``overlong = "error"``.
    """
    settle_day(tokenizer, Path(config.run.dir))
    section = config.data
    rollout = config.rollout
    train = config.train
    evaluation = config.eval
    per_step = train.global_batch_size // rollout.n
    if section.path is None:
        raise UserError("data.path", "is required", "name a file, folder, URL or hub id with prompts")
    trained_on = RowSet(section, "data.path")
    warnings: list[str] = []
    notes: list[str] = []
    prompts, dropped = _read_set(trained_on, config, tokenizer, warnings, notes)
    contents = {trained_on.key: _content_of(trained_on, prompts, dropped)}
    held_out: list[Prompt] = []
    if not isinstance(evaluation.split, str):
        # Rows that ask the same stay together.
        keys = np.array([content_key(prompt.messages or dict(prompt.row)) for prompt in prompts], dtype=np.uint64)
        [(kept, out)] = hold_out([keys], evaluation.split, names=[f"{trained_on.key}: {section.path}"])
        held_out = [prompts[at] for at in out]
        prompts = [prompts[at] for at in kept]
    for one in held_out_sets(config) if config.evaluates else []:
        found, long = _read_set(one, config, tokenizer, warnings, notes)
        held_out += found
        contents[one.key] = _content_of(one, found, long)
    most = evaluation.steps * train.global_batch_size if evaluation.steps else None
    asked = held_out[:most] if config.evaluates else []
    own = [content.digest for key, content in contents.items() if key != trained_on.key]  # one set, if it is no split
    steps = math.ceil((train.epochs or 0) * len(prompts) / per_step) if train.steps is None else train.steps
    return Prompts(
        prompts,
        fingerprint=digest_of(prompts),
        per_round=per_step * rollout.updates,
        updates=rollout.updates,
        seed=config.run.seed,
        shuffle=section.shuffle,
        total_steps=steps,
        endings=frozenset(turn_ends(tokenizer)),
        pad_id=cast(int, tokenizer.pad_token_id or 0),
        dropped=dropped,
        held_out=asked,
        held_out_fingerprint=own[0] if own and len(asked) == len(held_out) else digest_of(asked),
        contents=contents,
        warnings=warnings,
        notes=notes,
    )


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Digest of the prompts' rows and of their tokens."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(json.dumps([dict(prompt.row), list(prompt.ids)], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _content_of(one: RowSet, prompts: Sequence[Prompt], dropped: int) -> Content:
    return content_of(one.section, one.key, rows=len(prompts) + dropped, digest=digest_of(prompts))


def _read_set(
    one: RowSet, config: RLConfig, tokenizer: PreTrainedTokenizerBase, warnings: list[str], notes: list[str]
) -> tuple[list[Prompt], int]:
    """The prompts that leave room for a response, and the number of those that were dropped.

    Args:
        warnings, notes: what a person should know of the rows, and what was done with them, is added here.
    """
    section: Any = one.section
    findings = Findings()
    room = config.data.seq_len - config.rollout.max_new_tokens
    rows = list(RowReader(locate(section, one.key, cache=Cache(Path(config.run.dir))), download=True))
    prompts = encode_prompts(rows, section, tokenizer, findings=findings)
    warnings += findings.warnings(one.key, lambda number: rows[number].where)
    notes += findings.notes(one.key)
    short = [prompt for prompt in prompts if len(prompt.ids) <= room]
    if len(short) < len(prompts) and (section.overlong == "error" or not short):
        at, long = next((at, prompt) for at, prompt in enumerate(prompts) if len(prompt.ids) > room)
        what = f"the prompt has {len(long.ids)} tokens, and data.seq_len − rollout.max_new_tokens leaves {room}"
        todo = 'use a larger data.seq_len, or set data.overlong = "drop"'
        raise UserError(rows[at].where, f"{what} ({len(prompts) - len(short)} such rows of {len(prompts)})", todo)
    return short, len(prompts) - len(short)
