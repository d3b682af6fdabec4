"""The gate: every variant is compared with the plain loop, and gets a row of the printed table."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World, agreement, gather_objects
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.model.inspect import Traits, inspect_model
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import (
    Curves,
    Rows,
    document_lengths,
    errors,
    gradient_distances,
    load_plain,
    make_batches,
    plain_forward,
    plain_loop,
    relative,
)
from fsdp2kit.parity.variants import Variant, scaled_down_length, variants, write_model

FLOOR = 1e-5
CEILING = 1e-3
"""The largest bound in float32, however much plain transformers' own numbers change with the micro-batch size."""
STEPS = 5
COMPARED = ("loss", "grad_norm", "gradients", "logits")


@dataclass(frozen=True)
class Row:
    """A variant's verdict."""

    variant: Variant
    verdict: str
    """"ok", "miss" or "refused"."""
    differences: dict[str, float] = field(default_factory=dict)
    """Relative differences from the float32 reference, by what is compared."""
    bounds: dict[str, float] = field(default_factory=dict)
    """The largest difference that passes, by what is compared."""
    note: str = ""
    """Why it was refused, or where it first diverges."""


class Numbers(NamedTuple):
    """The numbers of a run that are compared."""

    curves: Curves
    logits: np.ndarray
    """Logits of one document in a packed row, before the first step, ``[n, V]``."""
    states: dict[str, np.ndarray]
    """That row's hidden states after each decoder layer, ``[S, H]``, by the layer's name, in the order of forward."""

    def differences(self, expected: Numbers) -> dict[str, float]:
        """Relative, by what is compared."""
        return {**errors(self.curves, expected.curves), "logits": relative(self.logits, expected.logits)}


@dataclass(frozen=True)
class Reference:
    """Plain transformers' numbers in float32, and how far off a variant may be."""

    exact: Numbers
    bounds: dict[str, dict[str, float]]
    """By dtype and by what is compared."""

    def compare(self, variant: Variant, found: Numbers) -> Row:
        """The variant's verdict."""
        differences, bounds = found.differences(self.exact), self.bounds[variant.dtype]
        if all(differences[name] <= bounds[name] for name in COMPARED):
            return Row(variant, "ok", differences, bounds)
        return Row(variant, "miss", differences, bounds, self._first_divergence(found, bounds))

    def _first_divergence(self, found: Numbers, bounds: dict[str, float]) -> str:
        """The first layer in forward whose output is off; if none is, the first in backward whose gradient is."""
        layers = self.exact.states
        for layer, expected in layers.items():
            if not relative(found.states[layer], expected) <= bounds["logits"]:
                return f"first diverges at {layer}"
        distances = gradient_distances(found.curves.gradients, self.exact.curves.gradients)
        names = [name for name, distance in distances.items() if not distance <= bounds["gradients"]]
        agrees = "every layer's output agrees; in backward it first diverges at"
        for layer in reversed(layers):
            if inside := [name for name in names if name.startswith(f"{layer}.")]:
                return f"{agrees} {layer} ({', '.join(inside)})"
        return f"{agrees} {', '.join(names)}" if names else "every layer's output and every gradient agree"


def check_parity(config: TrainingConfig, *, world: World, full: bool = False) -> list[Row]:
    """Compare every variant of ``config`` with plain transformers on rank 0. Collective.

    Args:
        full: compare the model and sequence length as they are, not a scaled-down copy.

    Raises:
        UserError: the model cannot be built, or adapters are trained.
    """
    if config.trains_adapter:
        what = "adapters are not compared here, only whole models"
        raise UserError("lora", what, "take [lora] and model.adapter out of the TOML that is compared")
    length = config.data.seq_len if full else scaled_down_length(world.size)
    with TemporaryDirectory(ignore_cleanup_errors=True) if world.is_main else nullcontext("") as mine:
        model = Path(gather_objects(mine)[0])  # every rank of this machine knows it
        reference: Reference | None = None
        rows: list[Row] = []
        with agreement():
            hf_config = load_hf_config(config.model)
            vocabulary = min(hf_config.get_text_config().vocab_size, 10_000) if full else 128
            # Every mesh of these ranks can slice the rows. Packed documents lie across slices or within one.
            batches = make_batches(
                STEPS, rows=2 * world.size, length=length, vocabulary=vocabulary, pack=config.data.pack
            )
            if world.is_main:
                write_model(hf_config, config, model, full=full, length=length)
                alone = inspect_model(load_plain(model)).separates_packed is not True
                reference = _run_reference(model, batches, dtype=config.fsdp.param_dtype, alone=alone)
        row, document = _probe_row(batches)
        traits: Traits | None = None  # of the one model that all variants train
        for variant in variants(config, world_size=world.size):
            ours = variant.config(config, model=model, batches=batches)
            try:
                sharded = Sharded(ours, world=world, traits=traits)
            except UserError as problem:  # every rank sees the same model and mesh, so every rank is refused
                rows.append(Row(variant, "refused", note=str(problem)))
                continue
            traits = sharded.traits
            logits, states = sharded.forward(row, document=document)
            found = Numbers(sharded.curves(batches), logits, states)
            verdict = reference.compare(variant, found) if reference is not None else None
            rows.append(gather_objects(verdict)[0])
        return rows


def _run_reference(model: Path, batches: list[Rows], *, dtype: str, alone: bool) -> Reference:
    """The plain loop in float32, and the bounds for float32 and for ``dtype``.

    float32: max(1e-5, 3 × the difference that another micro-batch size makes), at most 1e-3. Another dtype:
    3 × the difference of plain transformers in that dtype from float32.

    Args:
        alone: run documents one by one, as transformers would not keep packed ones apart.
    """
    row, document = _probe_row(batches)

    def run(size: int, dtype: str) -> Numbers:
        computed_in: Any = getattr(torch, dtype)
        curves = plain_loop(model, batches, micro_batch_size=size, lr=1e-3, dtype=computed_in, alone=alone)
        return Numbers(curves, *plain_forward(model, row, document=document, dtype=computed_in, alone=alone))

    def bounds(sizes: tuple[int, int], dtype: str, ceiling: float) -> dict[str, float]:
        controls = [run(size, dtype).differences(exact) for size in sizes]
        return {name: min(max(FLOOR, *(3 * each[name] for each in controls)), ceiling) for name in COMPARED}

    rows = len(batches[0].input_ids)
    exact = run(rows, "float32")
    by_dtype = {"float32": bounds((1, rows // 2), "float32", CEILING)}
    if dtype != "float32":
        by_dtype[dtype] = bounds((1, rows), dtype, float("inf"))
    return Reference(exact, by_dtype)


def _probe_row(batches: list[Rows]) -> tuple[Rows, range]:
    """A packed row, and the document in it that lies across the middle of the sequence, or ends there."""
    row = batches[0][1:2]
    lengths = document_lengths(row.position_ids[0])
    ends = zip(lengths, itertools.accumulate(lengths), strict=True)
    length, end = next(one for one in ends if one[1] >= sum(lengths) // 2)
    return row, range(end - length, end)
