"""The TOML's sections about what is trained, for which loss, and how an optimizer updates it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from fsdp2kit.config.section import InputPath, Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(Section):
    """Train low-rank adapters (peft's) beside the frozen model; docs/lora.md. Extra `lora`. On if `rank` is given."""

    rank: PositiveInt | None = None
    """Rank of the adapters. Without it there are none, unless `model.adapter` has some."""
    alpha: PositiveInt = 32
    """The adapters' output is multiplied by alpha / rank (rslora: by alpha / √rank)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped in training. Its masks depend on the mesh (`preflight.allow`)."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get an adapter: "all-linear" (all but the output head), the ends of their names
    (`["q_proj", "v_proj"]`), or a regular expression for the whole name."""
    modules_to_save: list[str] = []
    """Modules of which a copy is trained whole and kept with the adapter: `["lm_head", "embed_tokens"]`."""
    rslora: bool = False
    """Scale by alpha / √rank (arXiv:2312.03732), which keeps high ranks from learning slowly."""
    quantize: Literal["none", "nf4"] = "none"
    """"nf4" (QLoRA): the frozen linear layers of decoder layers are stored in
    4.5 bits a parameter, and quantised as they are read. "none": the frozen model is stored in `fsdp.param_dtype`."""
    dora: bool = False
    """Learn the length of each row of a weight apart from its direction (DoRA, arXiv:2402.09353); slower."""


class DPOConfig(Section):
    """The loss of recipe "dpo", which learns from pairs of answers; docs/preferences.md."""

    loss: Literal["dpo", "ipo", "simpo", "orpo"] = "dpo"
    """"dpo" (arXiv:2305.18290) and "ipo" (arXiv:2310.12036) compare with a frozen reference, the model as the run
    begins; "simpo" (arXiv:2405.14734) and "orpo" (arXiv:2403.07691) have none."""
    beta: PositiveFloat | None = None
    """dpo, ipo (its τ): the larger, the closer the model stays to the reference. simpo: scale of the rewards. orpo
    (its λ): weight of the odds ratio beside the likelihood. Default: 0.1; of simpo 2."""
    gamma: NonNegativeFloat | None = None
    """simpo only: how far the better answer's reward should be above the other's. Default: half of `beta`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo only: the share of pairs that are taken to be the wrong way round (conservative DPO)."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss in ("dpo", "ipo")

    @property
    def is_normalised(self) -> bool:
        """Whether an answer counts by the mean of its tokens' log-probabilities, not by their sum."""
        return self.loss != "dpo"

    @property
    def strength(self) -> float:
        """`beta`, or its default."""
        default = 2.0 if self.loss == "simpo" else 0.1
        return default if self.beta is None else self.beta

    @property
    def margin(self) -> float:
        """`gamma`, or its default."""
        return self.strength / 2 if self.gamma is None else self.gamma


class DistillConfig(Section):
    """The loss of recipe "distill", which learns a teacher's distribution; docs/recipes.md."""

    teacher: InputPath | None = None
    """The model to learn from: a Hugging Face model directory or hub id, with the same tokenizer. It is frozen."""
    direction: Literal["forward", "reverse"] = "forward"
    """"forward": KL(teacher ‖ model), which covers all that the teacher may say; "reverse": KL(model ‖ teacher), which
    keeps to what it says most."""
    temperature: PositiveFloat = 1.0
    """T: both distributions are those of logits ÷ T. The divergence is multiplied by T², which keeps the size of its
    gradients."""
    cross_entropy_weight: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight w of the plain cross-entropy of the targets; that of the divergence is 1 − w."""


class OptimizerConfig(Section):
    """The optimizer; docs/optimizers.md compares them."""

    name: Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"] = "adamw"
    """"adamw" (decoupled weight decay, arXiv:1711.05101), "adamw_bf16" (moments in bfloat16; they, and parameters that
    `fsdp.storage_dtype` stores in bfloat16, are rounded stochastically), "adamw_8bit" (torchao's; extra `lowbit`),
    or "muon" (torch's, for weights of linear layers; AdamW for the others)."""
    lr: NonNegativeFloat = 2e-5
    """Peak learning rate. Muon's updates are scaled to the size of AdamW's, so both use the same one."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """Decay rates of AdamW's first and second moments."""
    muon_momentum: Beta = 0.95
    """muon only: decay rate of its Nesterov momentum."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; norms and biases (parameters of fewer than two dimensions) are exempt."""


class LRScheduleConfig(Section):
    """The learning rate over the steps; transformers' schedules."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up: constant, linear to 0, half a cosine, or warm-up-stable-decay."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up, fewer than the run has; the first step has lr = 0 / warmup_steps."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The warm-up as a share of the run's steps, instead of `warmup_steps`."""
    decay_steps: PositiveInt | None = None
    """wsd only: steps of the final decay. Default: a tenth of the run, or what the warm-up leaves of it."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate ÷ peak (cosine and wsd)."""
