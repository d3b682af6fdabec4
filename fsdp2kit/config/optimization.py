"""The TOML's sections about what is trained, for which loss, and how an optimizer updates it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import InputPath, Section, untagged
from fsdp2kit.errors import UserError, check_installed

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
    (`["q_proj", "v_proj"]`), or a regular expression for the whole name. "experts" in a list: experts in one tensor,
    which "all-linear" leaves out."""
    modules_to_save: list[str] = []
    """Modules of which a copy is trained whole and kept with the adapter: `["lm_head", "embed_tokens"]`."""
    rslora: bool = False
    """Scale by alpha / √rank (arXiv:2312.03732), which keeps high ranks from learning slowly."""
    quantize: Literal["none", "nf4"] = "none"
    """"nf4" (QLoRA): the frozen linear layers and experts of decoder layers are stored in
    4.5 bits a parameter, and quantised as they are read. "none": the frozen model is stored in `fsdp.param_dtype`."""
    dora: bool = False
    """Learn the length of each row of a weight apart from its direction (DoRA, arXiv:2402.09353); slower."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        model = config.model
        if not config.trains_adapter:
            for name in self.changed():
                raise UserError(f"lora.{name}", "is set, but lora.rank is not", "set lora.rank, or leave it out")
            return
        check_installed("peft", where="lora.rank" if model.adapter is None else "model.adapter")
        if model.adapter is not None and (given := sorted(self.model_fields_set - {"dropout", "quantize"})):
            what = "is given beside model.adapter, whose adapter_config.json says it"
            raise UserError(f"lora.{given[0]}", what, "leave one of the two out")
        if model.freeze:
            raise UserError("model.freeze", "is set with adapters, which freeze the whole model", "leave it out")
        if model.weights not in ("pretrained", "random"):
            what = "is a checkpoint: an adapter is kept by itself, and peft could not load the model it belongs to"
            todo = "convert it (fsdp2kit convert) and give the directory as model.path"
            raise UserError("model.weights", what, todo)
        if model.weights == "random" and config.checkpoint.export_hf != "never":
            what = "'random' with adapters, whose export would be of no use without those random weights"
            raise UserError("model.weights", what, "use 'pretrained', or set checkpoint.export_hf = 'never'")
        if config.float8.recipe != "none":
            what = f"{config.float8.recipe!r} with adapters is not supported"
            raise UserError("float8.recipe", what, "set it to 'none'")


class DPOConfig(Section):
    """What every loss of recipe "dpo" has, which learns from pairs of answers; docs/preferences.md."""

    loss: str
    """"dpo", "ipo", "simpo" or "orpo"."""
    beta: PositiveFloat
    """Strength of the loss."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss in ("dpo", "ipo")

    @property
    def is_normalised(self) -> bool:
        """Whether an answer counts by the mean of its tokens' log-probabilities, not by their sum."""
        return self.loss != "dpo"

    def identity(self) -> dict[str, str]:
        return {"dpo.loss": self.loss}


class PlainDPOConfig(DPOConfig):
    """DPO, a loss of recipe "dpo"; docs/preferences.md."""

    loss: Literal["dpo"] = "dpo"
    """"dpo" (arXiv:2305.18290) compares with a frozen reference, the model as the run begins."""
    beta: PositiveFloat = 0.1
    """dpo: the larger, the closer the model stays to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs that are taken to be the wrong way round (conservative DPO)."""


class IPOConfig(DPOConfig):
    """IPO or ORPO, losses of recipe "dpo"; docs/preferences.md."""

    loss: Literal["ipo", "orpo"]
    """"ipo" (arXiv:2310.12036) compares with a frozen reference, the model as the run begins; "orpo"
    (arXiv:2403.07691) has none."""
    beta: PositiveFloat = 0.1
    """ipo (its τ): the larger, the closer the model stays to the reference. orpo (its λ): weight of the odds ratio
    beside the likelihood."""


class SimPOConfig(DPOConfig):
    """SimPO, a loss of recipe "dpo"; docs/preferences.md."""

    loss: Literal["simpo"]
    """"simpo" (arXiv:2405.14734) has no reference."""
    beta: PositiveFloat = 2.0
    """simpo: scale of the rewards."""
    gamma: NonNegativeFloat | None = None
    """How far the better answer's reward should be above the other's. Default: half of `beta`."""

    @property
    def margin(self) -> float:
        """`gamma`, or its default."""
        return self.beta / 2 if self.gamma is None else self.gamma


AnyDPO = Annotated[PlainDPOConfig | IPOConfig | SimPOConfig, Field(discriminator="loss"), untagged("loss", "dpo")]
"""The loss of recipe "dpo"."""


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

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.teacher is None:
            what = "is not given, and there is nothing to learn from"
            raise UserError("distill.teacher", what, "give a Hugging Face model directory or hub id")

    def models(self) -> dict[str, str]:
        return {"distill.teacher": self.teacher} if self.teacher else {}

    def identity(self) -> dict[str, str]:
        return {"distill.direction": self.direction}


class MoEConfig(Section):
    """How the experts of a mixture of experts are kept evenly loaded; docs/moe.md."""

    balance: str
    """"none", "aux" or "bias"."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.balance != "none" and config.compile.enabled:
            what = f"{self.balance!r} with compile.enabled, which was not tried"
            raise UserError("moe.balance", what, "set compile.enabled = false, or moe.balance = 'none'")


class UnbalancedConfig(MoEConfig):
    """Nothing keeps experts evenly loaded; docs/moe.md."""

    balance: Literal["none"] = "none"
    """"none": routers learn from the loss alone."""


class AuxiliaryLossConfig(MoEConfig):
    """A loss keeps experts evenly loaded; docs/moe.md."""

    balance: Literal["aux"]
    """"aux": transformers' load-balancing loss of each row (pack) over its whole length, added to what is minimised.
    The logged `loss` is without it."""
    aux_weight: PositiveFloat = 0.001
    """Weight of that loss beside the loss of a target."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        super().check(config, sizes)
        if config.engine_needs is not None:
            what = "'aux' with rollouts: packs of rollouts depend on the mesh, and so would the loss of a pack"
            raise UserError("moe.balance", what, "use 'bias' or 'none'")


class RouterBiasConfig(MoEConfig):
    """Biases of the routers keep experts evenly loaded; docs/moe.md."""

    balance: Literal["bias"]
    """"bias" (arXiv:2408.15664, DeepSeek-V3): after each step the bias of an expert that got fewer tokens of the
    global batch than the mean goes up, that of one with more goes down. For models with `e_score_correction_bias`."""
    bias_update_rate: PositiveFloat = 0.001
    """By how much a bias moves in a step (DeepSeek-V3's γ)."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        super().check(config, sizes)
        if config.trains_adapter:
            what = "'bias' with adapters, whose export does not hold the routers' biases"
            raise UserError("moe.balance", what, "use 'none', or train the whole model")


AnyMoE = Annotated[
    UnbalancedConfig | AuxiliaryLossConfig | RouterBiasConfig,
    Field(discriminator="balance"),
    untagged("balance", "none"),
]
"""How experts are kept evenly loaded."""


class OptimizerConfig(Section):
    """What every optimizer has; docs/optimizers.md compares them."""

    name: str
    """"adamw", "adamw_bf16", "adamw_8bit" or "muon"."""
    lr: NonNegativeFloat = 2e-5
    """Peak learning rate. Muon's updates are scaled to the size of AdamW's, so both use the same one."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """Decay rates of AdamW's first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; norms and biases (fewer than two dimensions, or named `…bias`) are exempt."""


class AdamWConfig(OptimizerConfig):
    """AdamW; docs/optimizers.md compares optimizers."""

    name: Literal["adamw", "adamw_bf16", "adamw_8bit"] = "adamw"
    """"adamw" (decoupled weight decay, arXiv:1711.05101), "adamw_bf16" (moments in bfloat16; they, and parameters that
    `fsdp.storage_dtype` stores in bfloat16, are rounded stochastically), "adamw_8bit" (torchao's; extra `lowbit`)."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        fsdp, name = config.fsdp, self.name
        if name != "adamw_8bit":
            return
        if fsdp.offload != "none":
            what = f"{fsdp.offload!r} with optimizer.name = {name!r}, whose quantised moments stay on the device"
            raise UserError("fsdp.offload", what, "set it to 'none', or optimizer.name = 'adamw_bf16'")
        if fsdp.storage_dtype != "float32":
            what = f"{fsdp.storage_dtype!r} with optimizer.name = {name!r}, which updates float32 parameters"
            raise UserError("fsdp.storage_dtype", what, "leave it out, or set optimizer.name = 'adamw_bf16'")
        check_installed("torchao", where="optimizer.name")


class MuonConfig(OptimizerConfig):
    """Muon for weights of linear layers, AdamW for the others; docs/optimizers.md compares optimizers."""

    name: Literal["muon"]
    """"muon" (torch's, for weights of linear layers; AdamW for the others)."""
    muon_momentum: Beta = 0.95
    """Decay rate of Muon's Nesterov momentum."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if config.fsdp.offload == "params":
            what = "'params' with optimizer.name = 'muon', whose matmuls of whole matrices would run on the host"
            raise UserError("fsdp.offload", what, "use 'optimizer' or 'none', or optimizer.name = 'adamw'")


AnyOptimizer = Annotated[AdamWConfig | MuonConfig, Field(discriminator="name"), untagged("name", "adamw")]
"""The optimizer."""


class LRScheduleConfig(Section):
    """What every learning-rate schedule has; they are transformers' own."""

    name: str
    """"constant", "linear", "cosine" or "wsd"."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up, fewer than the run has; the first step has lr = 0 (under "wsd" min_lr_ratio · lr)."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The warm-up as a share of the run's steps, instead of `warmup_steps`."""

    def warmup(self, total_steps: int) -> int:
        """Steps of the warm-up of a run of ``total_steps``; at least one step follows it, or the run is refused."""
        steps, ratio = self.warmup_steps, self.warmup_ratio
        if steps and ratio:
            what = f"{steps} beside lr_schedule.warmup_ratio = {ratio}"
            raise UserError("lr_schedule.warmup_steps", what, "leave one of them out")
        if ratio:
            return min(math.ceil(ratio * total_steps), max(0, total_steps - 1))
        if steps >= total_steps > 0:
            what = f"{steps}, but the whole run has {total_steps} steps, so the rate would never be lr"
            todo = "use fewer, or a share of the run: lr_schedule.warmup_ratio = 0.03"
            raise UserError("lr_schedule.warmup_steps", what, todo)
        return steps

    def check(self, config: Any, sizes: MeshSizes) -> None:
        self.warmup(config.train.steps or 0)  # the data tell the steps of epochs


class PlainScheduleConfig(LRScheduleConfig):
    """The learning rate over the steps, constant or linear; transformers' schedules."""

    name: Literal["constant", "linear"]
    """"constant" after the warm-up, or "linear" to 0."""


class CosineScheduleConfig(LRScheduleConfig):
    """The learning rate over the steps, half a cosine; transformers' schedule."""

    name: Literal["cosine"] = "cosine"
    """"cosine": half a cosine after the warm-up."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate ÷ peak."""


class WSDScheduleConfig(LRScheduleConfig):
    """The learning rate over the steps: warm-up, stable, decay; transformers' schedule."""

    name: Literal["wsd"]
    """"wsd": warm-up, stable, decay along half a cosine."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate ÷ peak."""
    decay_steps: PositiveInt | None = None
    """Steps of the final decay. Default: a tenth of the run, or what the warm-up leaves of it."""

    def warmup(self, total_steps: int) -> int:
        steps = super().warmup(total_steps)
        if total_steps and steps + (self.decay_steps or 0) > total_steps:
            what = f"{self.decay_steps} after {steps} steps of warm-up, but the whole run has {total_steps} steps"
            raise UserError("lr_schedule.decay_steps", what, "make one of them shorter")
        return steps


AnySchedule = Annotated[
    PlainScheduleConfig | CosineScheduleConfig | WSDScheduleConfig,
    Field(discriminator="name"),
    untagged("name", "cosine"),
]
"""The learning-rate schedule."""
