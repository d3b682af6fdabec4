"""[model]: which model, from where, and which of its parameters are trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.path_contents import INSTEAD_OF_MODEL, INSTEAD_OF_ROWS, Contents, check_contents, check_exists
from fsdp2kit.config.section import InputPath, LocalPath, Section, TemplatePath
from fsdp2kit.errors import UserError

# What to do about what lies at a path, by the key that it was given for.
_INSTEAD: dict[str, dict[Contents, str]] = {
    "path": {
        **INSTEAD_OF_MODEL,
        "checkpoint": "set model.weights = '{path}' and model.path = '{path}/hf', or convert it: fsdp2kit convert",
        "run": "give its export, model.path = '{path}/hf', or model.weights = one of '{path}/checkpoints/'",
    },
    "weights": {
        **INSTEAD_OF_MODEL,
        "model": "set model.path to it, and leave model.weights out",
        "run": "give one of its checkpoints, in '{path}/checkpoints/'",
        "weights": "convert it first: fsdp2kit convert '{path}' OUT --config HF_DIR",
        "gguf": "GGUF is not read: set model.path to the directory of the original",
    },
    "tokenizer": {"checkpoint": "give '{path}/hf'", "run": "give '{path}/hf'", "rows": INSTEAD_OF_ROWS},
    "adapter": {
        "checkpoint": "give the export of a run with [lora], or make one: fsdp2kit convert",
        "run": "give its export, '{path}/hf'",
        "weights": "give the directory that holds adapter_config.json",
        "gguf": "give the directory that holds adapter_config.json",
        "rows": INSTEAD_OF_ROWS,
    },
}


def _refuse_cudnn(value: object) -> object:
    if value == "cudnn":
        what = (
            "torch 2.13 leaves cuDNN's variable-length attention switched off itself: it plans anew in every call, "
            "and unaligned tensors give wrong results without an error"
        )
        raise PydanticCustomError("cudnn", what)
    return value


FlashKernel = Annotated[Literal["auto", "flash2", "flash3", "flash4"], BeforeValidator(_refuse_cudnn)]
"""What computes attention "varlen" on CUDA."""


class ModelConfig(Section):
    """Which model, from where."""

    path: InputPath | None = None
    """A Hugging Face model directory or hub id. Optional when `config.model_type` is given."""
    weights: Literal["pretrained", "random"] | LocalPath = "pretrained"
    """"pretrained" (from `path`), "random", or the path of a DCP checkpoint (weights only)."""
    config: dict[str, Any] = {}
    """Overrides of the Hugging Face config, e.g. `{ num_hidden_layers = 4 }`; with `model_type`, a complete config.
    A key may have any name that transformers knows it by."""
    attention: str = "auto"
    """"varlen" (ours: documents and sliding windows without masks), or an attention implementation of transformers:
    "sdpa", "eager", "flash_attention_2", "flex_attention", …. "auto": "varlen" if it computes the same as the
    model's own, else "sdpa" ("eager" for models without it). The start says which and why."""
    kernel: FlashKernel = "auto"
    """What computes attention "varlen" on CUDA: "flash2" (FlashAttention-2, which torch has), "flash3" (Hopper) or
    "flash4" (Hopper, Blackwell), packages of your own. The start compares these two with plain attention, and says
    which runs. "auto": "flash2"."""
    liger: bool = False
    """Use Liger's kernels for norms, RoPE and gated MLPs. Needs a GPU and the extra `liger`."""
    tokenizer: InputPath | None = None
    """Directory or hub id of the tokenizer. Default: `path`."""
    chat_template: TemplatePath | None = None
    """A Jinja chat template file, or the name of a ready one ("chatml", "llama3", "gemma", "mistral", "zephyr"), used
    instead of the tokenizer's own and exported with the model. Special tokens that it needs are added."""
    trust_remote_code: bool = False
    """Run the model repository's own Python code. Leave it off unless you have read that code."""
    freeze: list[str] = []
    """Name patterns of parameters that are not trained: `["model.embed_tokens.*", "*.layers.[0-7].*"]`."""
    adapter: InputPath | None = None
    """Train this LoRA adapter further: a directory as peft writes it (such as an earlier run's `hf`), or a hub id."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.path is None and "model_type" not in self.config:
            todo = "give a Hugging Face directory or hub id, or a config with its model_type"
            raise UserError("model", "neither model.path nor model.config.model_type is given", todo)
        if self.path is None and self.weights == "pretrained":
            what = "'pretrained' without a model.path to load from"
            raise UserError("model.weights", what, "give model.path, or set model.weights = 'random'")
        if self.liger and config.activation_checkpointing.mode == "selective":
            # torch does not see what Triton's kernels write, so its own checks would not notice.
            what = "true with mode = 'selective': Liger's RoPE changes in place the results that are kept for backward"
            raise UserError("model.liger", what, 'set activation_checkpointing.mode = "full"')
        check_contents("model.path", self.path, _INSTEAD["path"])
        check_contents("model.weights", self.weights, _INSTEAD["weights"])
        check_contents("model.tokenizer", self.tokenizer, _INSTEAD["tokenizer"])
        check_contents("model.adapter", self.adapter, _INSTEAD["adapter"])
        check_exists("model.weights", self.weights, words=("pretrained", "random"))
