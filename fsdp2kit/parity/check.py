"""The gate itself: every variant against the plain loop, a row of a table each."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.distributed import World, agreement, gather_objects
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import load_hf_config
from fsdp2kit.parity.cases import Variant, variants
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.likeness import likeness_length, write_model
from fsdp2kit.parity.reference import Curves, errors, gradient_distances, plain_forward, plain_loop
from fsdp2kit.parity.rows import Rows, make_batches

FLOOR = 1e-5
CEILING = 1e-3
"""In float32 nothing beyond this passes, however much plain transformers' own numbers move with the micro-batch."""
STEPS = 5
COMPARED = ("loss", "grad_norm", "gradients", "logits")


@dataclass(frozen=True)
class Row:
    """A variant's verdict."""

    variant: Variant
    verdict: str
    """"ok", "miss" or "refused"."""
    differences: dict[str, float] = field(default_factory=dict)
    """Relative, by what is compared; bfloat16's are those to float32."""
    bounds: dict[str, float] = field(default_factory=dict)
    note: str = ""
    """What refused it, or where it first diverges."""

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.variant.as_row(),
            "verdict": self.verdict,
            "differences": self.differences,
            "bounds": self.bounds,
            "note": self.note,
        }


@dataclass(frozen=True)
class Reference:
    """The plain loop's numbers for one dtype, and how far off others may be."""

    curves: Curves
    logits: np.ndarray
    bounds: dict[str, float]


def check_parity(config: TrainingConfig, *, world: World, full: bool = False) -> list[Row]:
    """Compare every variant of ``config`` with plain transformers on rank 0. Collective.

    Args:
        full: the model and sequence length as they are, not a small likeness.

    Raises:
        UserError: the model cannot be built.
    """
    with _folder(world) as folder:
        with agreement():
            hf_config = load_hf_config(config.model)
            if world.is_main:
                write_model(hf_config, config, folder / "model", full=full, world_size=world.size)
        with agreement():
            batches = _batches(hf_config, config, world=world, full=full)
        references: dict[str, Reference] = {}
        with agreement():
            if world.is_main:
                references = _references(folder / "model", batches, dtype=config.fsdp.param_dtype)
        comparison = _Comparison(folder / "model", batches, references, config, world)
        return [comparison.row(variant) for variant in variants(config, world_size=world.size)]


@contextmanager
def _folder(world: World) -> Iterator[Path]:
    """A temporary folder that every rank of this machine knows."""
    mine = tempfile.mkdtemp(prefix="fsdp2kit-parity-") if world.is_main else ""
    folder = Path(gather_objects(mine)[0])
    try:
        yield folder
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def _batches(hf_config: PretrainedConfig, config: TrainingConfig, *, world: World, full: bool) -> list[Rows]:
    """Rows that every mesh of these ranks can cut; packed: documents across borders, and shorter than a shard."""
    length = config.data.seq_len if full else likeness_length(world.size)
    vocabulary = hf_config.get_text_config().vocab_size if full else 128
    return make_batches(
        STEPS, rows=2 * world.size, length=length, vocabulary=min(vocabulary, 10_000), pack=config.data.pack
    )


def _references(model: Path, batches: list[Rows], *, dtype: str) -> dict[str, Reference]:
    """The plain loop in float32 and in ``dtype``; bounds as the parity gate has them.

    float32: max(1e-5, 3 × the difference that another micro-batch size makes), at most 1e-3. Another dtype: to
    float32, no more than 3 × what plain transformers' own computation in that dtype differs by.
    """
    rows = len(batches[0].input_ids)
    exact = _plain(model, batches, rows, torch.float32)
    others = [_plain(model, batches, size, torch.float32) for size in (1, rows // 2)]
    control = _worst([_differences(*other, *exact) for other in others])
    exact_bounds = {name: min(max(FLOOR, 3 * value), CEILING) for name, value in control.items()}
    found = {"float32": Reference(*exact, exact_bounds)}
    if dtype != "float32":
        rough = [_plain(model, batches, size, getattr(torch, dtype)) for size in (1, rows)]
        control = _worst([_differences(*other, *exact) for other in rough])
        found[dtype] = Reference(*exact, {name: max(FLOOR, 3 * value) for name, value in control.items()})
    return found


def _plain(model: Path, batches: list[Rows], size: int, dtype: torch.dtype) -> tuple[Curves, np.ndarray]:
    curves = plain_loop(model, batches, micro_batch_size=size, lr=1e-3, dtype=dtype)
    row, document = probe_row(batches)
    return curves, plain_forward(model, row, document=document, dtype=dtype)[0]


def probe_row(batches: list[Rows]) -> tuple[Rows, range]:
    """A packed row, and the document in it that lies across the middle of the sequence."""
    row = batches[0][1:2]
    positions, middle = row.position_ids[0], row.position_ids.shape[1] // 2
    starts = [*(positions == 0).nonzero().squeeze(1).tolist(), len(positions)]
    start = max(place for place in starts if place < middle)
    return row, range(start, min(place for place in starts if place > start))


def _differences(
    curves: Curves, logits: np.ndarray, expected: Curves, expected_logits: np.ndarray
) -> dict[str, float]:
    return {**errors(curves, expected), "logits": relative(logits, expected_logits)}


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """L2 norm of the difference over that of ``expected``."""
    return float(np.linalg.norm((found - expected).astype(np.float64)) / np.linalg.norm(expected.astype(np.float64)))


def _worst(several: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in several) for name in several[0]}


@dataclass(frozen=True)
class _Comparison:
    """What every variant is compared with; the references are on rank 0."""

    model: Path
    batches: list[Rows]
    references: dict[str, Reference]
    config: TrainingConfig
    world: World

    def row(self, variant: Variant) -> Row:
        row, document = probe_row(self.batches)
        rows, seq_len = self.batches[0].input_ids.shape
        pack = self.config.data.pack
        config = variant.config(
            self.config, model=self.model, rows=rows, seq_len=seq_len, pack=pack, steps=len(self.batches)
        )
        try:
            sharded = Sharded(config, world=self.world)
        except UserError as problem:  # every rank sees the same model and mesh, so every rank is refused
            return Row(variant, "refused", note=str(problem))
        logits, _ = sharded.forward(row, document=document)
        curves = sharded.curves(self.batches)
        mine = None
        if self.world.is_main:
            reference = self.references[variant.dtype]
            differences = _differences(curves, logits, reference.curves, reference.logits)
            missed = [name for name in COMPARED if not differences[name] <= reference.bounds[name]]
            mine = Row(variant, "miss" if missed else "ok", differences, reference.bounds)
        verdict: Row = gather_objects(mine)[0]
        if verdict.verdict == "ok":
            return verdict
        where = self._first_divergence(config, curves, bounds=verdict.bounds, dtype=variant.dtype)
        return Row(variant, "miss", verdict.differences, verdict.bounds, where)

    def _first_divergence(
        self, config: TrainingConfig, curves: Curves, *, bounds: dict[str, float], dtype: str
    ) -> str:
        """The first layer whose output is off; if none, the last in the order of the forward pass, which is the first
        in backward, whose gradient is."""
        row, document = probe_row(self.batches)
        _, states = Sharded(config, world=self.world).forward(row, document=document)
        note = ""
        if self.world.is_main:
            _, expected = plain_forward(self.model, row, document=document)
            off = [name for name in expected if not relative(states[name], expected[name]) <= bounds["logits"]]
            backward = partial(self._first_gradient, curves, bounds["gradients"], dtype, layers=list(expected))
            note = f"first diverges at {off[0]}" if off else backward()
        return gather_objects(note)[0]

    def _first_gradient(self, curves: Curves, bound: float, dtype: str, *, layers: list[str]) -> str:
        expected = self.references[dtype].curves.gradients
        distances = gradient_distances(curves.gradients, expected)
        names = [name for name, distance in distances.items() if not distance <= bound]
        agrees = "every layer's output agrees; in backward it first diverges at"
        for layer in reversed(layers):
            if inside := [name for name in names if name.startswith(f"{layer}.")]:
                return f"{agrees} {layer} ({', '.join(inside)})"
        return f"{agrees} {', '.join(names)}" if names else "every layer's output and every gradient agree"
