"""Distillation: a model learns a frozen teacher's whole distribution of the next token (arXiv:1503.02531).

Logits of both models exist for a few hundred tokens at a time (`over_chunks`). The gradients are computed in the same
pass, while the heads of both are gathered, so backward only scales them and needs nothing of the teacher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp2kit.config.schema import (
    Float8Config,
    LoraConfig,
    ModelConfig,
    PreflightConfig,
    TrainingConfig,
    UnbalancedConfig,
)
from fsdp2kit.config.sections.distill import DistillConfig
from fsdp2kit.data.sources import held_out_sets, training_sets
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import agreement
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.model.build import build_model
from fsdp2kit.model.loss_head import LossHead, gathered_head, sum_by_group
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.objectives.reference import parallelize_frozen
from fsdp2kit.parallel.context_parallel.batch import CHUNKED, layer_kinds, layer_windows
from fsdp2kit.parallel.context_parallel.layout import VARLEN, AttentionPath
from fsdp2kit.parallel.plan import ParallelPlan, plan_parallel
from fsdp2kit.torch_compat import forget_forwards

_KEY = "distill.teacher"


@dataclass(frozen=True)
class Teacher:
    """A frozen model on meta, and how it is made parallel; see `build_teacher`."""

    model: Any
    plan: ParallelPlan

    def describe(self) -> str:
        """It in a line, for the start of a run."""
        name = self.plan.model.path
        units = len(self.plan.units)
        return f"teacher: {name}, {self.plan.parameters:,} parameters in {self.plan.ledger.compute}, {units} units"


def build_teacher(
    section: DistillConfig,
    model: PreTrainedModel,
    *,
    config: TrainingConfig,
    plan: ParallelPlan,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Teacher:
    """The teacher on meta, planned for the same mesh and batches as the model that learns. Collective.

    It is sharded as that is, stored in ``fsdp.param_dtype``, and keeps none of its parameters gathered after forward.

    Args:
        model: the one that learns, as `build_model` made it.
        plan: of ``model``.
        tokenizer: of ``model``; None: not known, and both vocabularies must have the same size.

    Raises:
        UserError: there is no such model, or it cannot read what ``model`` reads.
    """
    theirs = _config_of_teacher(section, config, plan)
    with _named_teacher():
        teacher = build_model(theirs.model)
        own = None if tokenizer is None else build_tokenizer(theirs.model)
        frozen = plan_parallel(teacher.eval().requires_grad_(False), theirs, plan.sizes, plan.device_type)
    sets = [*training_sets(config.data), *(held_out_sets(config) if config.evaluates else [])]
    with agreement():
        any_id = any(one.section.format == "tokens" for one in sets)
        _check_vocabulary((model, teacher), (tokenizer, own), any_id=any_id)
        _check_inputs(teacher, frozen.attention, model, plan.attention)
    return Teacher(teacher, replace(frozen, attention=plan.attention))


def _check_inputs(
    teacher: PreTrainedModel, theirs: AttentionPath, model: PreTrainedModel, ours: AttentionPath
) -> None:
    """Refuse a teacher for which the model's batches say too little, or something else, about what tokens see."""
    windows = [layer_windows(one.config) for one in (model, teacher)]
    kinds = [layer_kinds(one.config.get_text_config()) for one in (model, teacher)]
    what = None
    if windows[0] != windows[1]:
        what = f"its layers' attention windows are {windows[1]}, those of the model {windows[0]}"
    elif ours.kernel == VARLEN and CHUNKED in kinds[0] and kinds[0] != kinds[1]:  # batches name layers by number
        what = "other layers of it see documents in chunks than of the model"
    elif (theirs.recurrent_layers > 0) != (ours.recurrent_layers > 0):
        state = "carry a state along the sequence" if theirs.recurrent_layers else "carry no state"
        what = f"its layers {state}, unlike the model's"
    elif theirs.masks_every_row and not ours.masks_every_row:
        what = "its own masks let packed documents see each other, and the model's batches have none"
    if what:
        raise UserError(_KEY, what, "choose a teacher whose attention sees the same tokens")


def describe_teacher_offline(
    section: DistillConfig, *, config: TrainingConfig, model: PreTrainedModel | None, plan: ParallelPlan | None
) -> str | None:
    """The line of a teacher that the model can learn from; None if one of both, or a tokenizer, is not here.

    Args:
        model, plan: as for `build_teacher`; None: the model is not here.

    Raises:
        UserError: the teacher is here, and the model cannot learn from it.
    """
    if model is None or plan is None or section.teacher is None:
        return None
    try:
        tokenizer = build_tokenizer(config.model, local_files_only=True)
        return build_teacher(section, model, config=config, plan=plan, tokenizer=tokenizer).describe()
    except UserError as error:
        if Path(section.teacher).is_absolute() and error.where.startswith(_KEY):
            raise
        return None


def _config_of_teacher(section: DistillConfig, config: TrainingConfig, plan: ParallelPlan) -> TrainingConfig:
    """The config of a run that would train the teacher on the same batches, cut in the same way."""
    # Its own classes and modules have other names.
    named = {"class_dtypes": {}, "unit_classes": [], "ignored_modules": []}
    attention = plan.attention
    # torch has one FlashAttention for a process. It is tried with the teacher's heads, too.
    kernel = config.model.kernel
    trusts = config.model.trust_remote_code
    sections = {
        "model": ModelConfig(
            path=section.teacher, attention=attention.kernel, kernel=kernel, trust_remote_code=trusts
        ),
        "fsdp": config.fsdp.model_copy(update=named),
        "context_parallel": config.context_parallel.model_copy(update={"method": attention.method or "auto"}),
        "lora": LoraConfig(),
        "float8": Float8Config(),
        "moe": UnbalancedConfig(),
        # A model that is not trained drops nothing, and routes as it does.
        "preflight": PreflightConfig(allow=["dropout", "router_aux_loss"]),
    }
    return config.model_copy(update=sections)


@contextlib.contextmanager
def _named_teacher() -> Iterator[None]:
    """Refusals of the teacher name its key, not those of the model that learns."""
    try:
        yield
    except UserError as error:
        where = error.where.removeprefix("model.path").removeprefix("model.tokenizer").strip(": ")
        raise UserError(f"{_KEY}: {where}".removesuffix(": "), error.what, "choose another teacher") from error


def _check_vocabulary(models: Sequence[PreTrainedModel], tokenizers: Sequence[Any], *, any_id: bool) -> None:
    """Refuse a teacher to which a token id means something else.

    Args:
        models, tokenizers: of the model that learns, and of the teacher; a tokenizer may be None.
        any_id: whether the data may have ids that no tokenizer gives.
    """
    todo = "choose a teacher with the same tokenizer"
    sizes: list[Any] = [one.get_input_embeddings().num_embeddings for one in models]
    if None in tokenizers:
        if sizes[0] != sizes[1]:
            raise UserError(_KEY, f"its vocabulary has {sizes[1]} tokens, that of the model {sizes[0]}", todo)
        return
    known, others = (one.get_vocab() for one in tokenizers)
    if differing := sorted((at, text) for text, at in known.items() if others.get(text) != at):
        at, text = differing[0]
        theirs = others.get(text, "none")
        what = f"{len(differing)} of {len(known)} tokens have another id in its vocabulary: {text!r} has {theirs}, in "
        raise UserError(_KEY, f"{what}the model's {at}", todo)
    if any_id and sizes[0] > sizes[1]:
        what = f"its embedding has {sizes[1]} rows, the model's {sizes[0]}, and the data are ids, which may go as far"
        raise UserError(_KEY, what, "choose a teacher with as many rows")
    if max(known.values()) >= sizes[1]:
        raise UserError(_KEY, f"its embedding has {sizes[1]} rows, fewer than its tokenizer has tokens", todo)


def build_distillation(
    section: DistillConfig, teacher: Teacher, *, config: TrainingConfig, mesh: Mesh
) -> Distillation:
    """The objective of a run, with the teacher's weights sharded over the mesh. Collective.

    Args:
        teacher: `build_teacher`'s; its model is made parallel in place.

    Raises:
        UserError: its weights cannot be read.
    """
    with _named_teacher():
        parallelize_frozen(teacher.model, teacher.plan, mesh=mesh, seed=config.run.seed)
    return Distillation(section, teacher.model)


@dataclass(frozen=True)
class Distillation:
    """The objective (1 − w)·T²·KL + w·cross-entropy, summed over targets, w being ``cross_entropy_weight``.

    Its metrics are ``kl``, the divergence at temperature T, and the plain ``cross_entropy``.
    """

    section: DistillConfig
    teacher: Any
    """Sharded, with its weights."""

    def __call__(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """See `fsdp2kit.train.step.Objective`. Collective."""
        inputs = dict(inputs)
        groups = inputs.pop("groups", None)
        num_groups = inputs.pop("num_groups", 0)
        # First, while no activations are kept for a backward.
        with torch.no_grad():
            states, _ = self.teacher.target_states(**inputs)
        forget_forwards(self.teacher)
        with gathered_head(self.teacher) as head:
            of_chunk = partial(of_student, head=head, states=states, section=self.section)
            loss, values = model.on_head(of_chunk, beside=len(head.weight), **inputs)
        losses, divergences, cross_entropies = values.unbind(1)
        metrics = {"kl": divergences.sum(), "cross_entropy": cross_entropies.sum()}
        return loss, None if groups is None else sum_by_group(losses, groups, num_groups), metrics


def of_student(
    logits: Tensor,
    labels: Tensor,
    rows: slice,
    *,
    wants_slope: bool,
    factors: None,
    head: LossHead,
    states: Tensor,
    section: DistillConfig,
) -> tuple[Tensor, Tensor | None]:
    """The `OfChunk` of loss, divergence and cross-entropy of the student's distributions: ``[n, 3]``.

    Args:
        factors: None, since the loss is summed.
        head: the teacher's, gathered.
        states: ``[N, H]``, the hidden states that go into it, whose width may be another than the student's.
    """
    values, slope = divergence(logits, head.logits(states[rows]), labels, section)
    return values, slope if wants_slope else None


def divergence(logits: Tensor, target: Tensor, labels: Tensor, section: DistillConfig) -> tuple[Tensor, Tensor]:
    """Loss, divergence and cross-entropy of each token, float32 ``[n, 3]``, and the loss's gradient.

    Args:
        logits: ``[n, V]`` of the student.
        target: ``[n, W]`` of the teacher; only the ids that both have are compared.
        labels: int64 ``[n]``.

    Returns:
        The gradient with respect to ``logits`` is float32 ``[n, V]``.
    """
    # Σ (p − q) = 0 is part of both sums: it takes the rounding of the normalisers out of them, which at a high
    # temperature is larger than the divergence.
    temperature = section.temperature
    weight = section.cross_entropy_weight
    shared = min(logits.shape[1], target.shape[1])
    log_p = _log_softmax(logits[:, :shared], temperature)
    log_q = _log_softmax(target[:, :shared], temperature)
    p = log_p.exp()
    if section.direction == "forward":
        q = log_q.exp()
        terms = log_q.sub_(log_p).mul_(q)
        slope = p.sub_(q)
        kl = terms.add_(slope).sum(dim=1)
    else:
        ratio = log_p.sub(log_q)
        kl = (p * ratio).sub_(p).add_(log_q.exp_()).sum(dim=1)
        slope = ratio.sub_(kl[:, None]).mul_(p)
    gradient = slope.mul_((1 - weight) * temperature)  # T² of the loss ÷ T of the logits
    is_plain = temperature == 1 and shared == logits.shape[1]
    log_softmax = log_p if is_plain else _log_softmax(logits, 1.0)
    cross_entropy = -log_softmax.gather(1, labels[:, None]).squeeze(1)
    if shared < logits.shape[1]:
        gradient = F.pad(gradient, (0, logits.shape[1] - shared))
    if weight:
        wanted = torch.full_like(labels, -weight, dtype=torch.float32)[:, None]
        gradient.add_(log_softmax.exp(), alpha=weight).scatter_add_(1, labels[:, None], wanted)
    loss = (1 - weight) * temperature**2 * kl + weight * cross_entropy
    return torch.stack([loss, kl, cross_entropy], dim=1), gradient


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()
    return (logits if temperature == 1 else logits / temperature).log_softmax(dim=1)
