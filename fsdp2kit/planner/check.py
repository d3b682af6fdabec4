"""``--check``: everything that can be checked on this machine without weights, network or process group."""

from __future__ import annotations

from pathlib import Path

from transformers import AttentionInterface, PreTrainedModel

from fsdp2kit.checkpoint.offline import try_places
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.checks import MeshSizes, resolve_accumulation
from fsdp2kit.config.data_schema import ASKED
from fsdp2kit.console import counted
from fsdp2kit.data.checks import check_first_rows, count_steps
from fsdp2kit.errors import UserError
from fsdp2kit.job.layout import Layout, node_names
from fsdp2kit.model.build import build_model
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.parallel.plan import plan_parallel


def check_offline(
    config: TrainingConfig, sizes: MeshSizes, *, local_world_size: int = 8
) -> tuple[list[str], list[str]]:
    """Plan the run as a recipe's `main` does, and read its data: the first rows, or all if that takes seconds.

    The places that the run writes to are tried, without leaving anything there.

    Args:
        sizes: of the mesh.
        local_world_size: ranks of a node.

    Returns:
        The plan's lines (only the mesh if the model is not on this machine), and what is not on this machine and was
        not checked: "model", a TOML key, …

    Raises:
        UserError: what `build_model`, `plan_parallel`, the run directory or the data would refuse.
    """
    layout = Layout(sizes, config.fsdp, node_names(sizes.world_size, local_world_size))
    lines, unchecked, model, plan = [str(sizes)], [], None, None
    try:
        load_hf_config(config.model, local_files_only=True)
    except UserError:
        if config.model.path is None or Path(config.model.path).is_absolute():
            raise
        unchecked.append("model")
    else:
        adapter = Path(config.model.adapter or "/")
        if adapter.is_absolute() or adapter.is_dir():
            model, is_replaced = _build_model(config)
            if is_replaced:
                unchecked.append(f"model.attention {config.model.attention!r}")
            plan = plan_parallel(model, config, sizes)
            lines = plan.describe()
        else:  # an id of the hub
            unchecked.append("model.adapter")
    lines = [*layout.draw(), *lines, *layout.warnings(), *try_places(config)]
    data, train = config.data, config.train
    accumulation = resolve_accumulation(train.global_batch_size, train.micro_batch_size, dp=sizes.dp)
    if data.format not in ASKED:  # how long responses are is not known
        lines.append(
            f"a step: {counted(train.global_batch_size, 'pack')} of {data.seq_len:,} tokens, in "
            f"{counted(accumulation, 'micro-batch')} of {train.micro_batch_size} on each of "
            f"{counted(sizes.dp, 'data-parallel rank')}"
        )
    has_data = data.format == "synthetic" or data.path is not None or bool(data.sources)
    missing = check_first_rows(config) if has_data else []
    for key, line in config.offline(config, model=model, plan=plan, missing=missing).items():
        if line is None:
            unchecked.append(key)
        else:
            lines.append(line)
    if not has_data:
        lines.append("data unchecked: none are given, and a run needs them: data.path=FILE")
    elif not missing:
        lines += count_steps(config, model=model)
    return lines, [*unchecked, *missing]


def _build_model(config: TrainingConfig) -> tuple[PreTrainedModel, bool]:
    """The model on meta, and whether it has another attention because this machine lacks the flash attention."""
    section, lora = config.model, config.lora
    try:
        return build_model(section, lora=lora, local_files_only=True), False
    except UserError:
        name = section.attention
        if not name.startswith("flash_attention") or name not in AttentionInterface().valid_keys():
            raise
        model = build_model(section.model_copy(update={"attention": "eager"}), lora=lora, local_files_only=True)
        if not model._supports_flash_attn:
            raise
        return model, True
