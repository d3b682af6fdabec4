"""The rollout side: keys and values, and what a cycle takes while the engine gets its weights and generates."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.config.schema import ActivationCheckpointingConfig
from fsdp2kit.model.flops import attention_layers, head_widths
from fsdp2kit.parallel.context_parallel.batch import layer_kinds, layer_windows
from fsdp2kit.planner.activations import item_bytes, layers_memory
from fsdp2kit.planner.memory import Moment
from fsdp2kit.planner.sizes import StepMemory, at_rest, engine_bytes


def kv_cache_bytes(model: PreTrainedModel, *, rows: int, length: int, tp: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of the keys and values that one rank caches for ``rows`` sequences of ``length`` tokens.

    Heads are dealt out over ``tp``; where there are fewer, each rank keeps one. A layer with a sliding window keeps no
    more tokens than that, one without attention none at all: its own state, of a fixed size, is not counted. Latent
    attention caches what it expands to, as transformers does.
    """
    config = model.config.get_text_config()
    kinds, windows = layer_kinds(config), layer_windows(config)
    total = 0
    for number, layer in attention_layers(config).items():
        heads = getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", 0)
        if heads:
            tokens = min(length, windows[kinds[number]] or length)
            total += -(-heads // tp) * sum(head_widths(layer)) * tokens
    return total * rows * item_bytes(dtype)


def rollout_moments(config: RLConfig, model: PreTrainedModel, step: StepMemory) -> list[Moment]:
    """What is allocated while weights go to the engine, and while it generates; of a server, the trainer's side alone.

    Prompts are taken to be as long as ``data.seq_len`` lets them, and every response to be cut. Their activations are
    those of one layer without gradients, where a formula describes it.
    """
    rollout, weights = config.rollout, engine_bytes(config, model)
    largest = max(parameter.numel() for parameter in model.parameters()) * item_bytes(config.engine_dtype)
    rest = at_rest(step)
    engine = {"engine": weights} if weights else {}
    buckets = {"weight buckets": 2 * config.weight_sync.bucket_mib * 2**20 + largest}
    sync = Moment("sync", "a bucket loads, the next is gathered", {**rest, **engine, **buckets})
    if not weights:
        return [sync]
    responses = -(-config.train.global_batch_size * rollout.updates // step.plan.sizes.world_size) * rollout.tp
    if config.eval.every:  # of prompts of which there may be more
        responses = rollout.batch_size
    rows = min(rollout.batch_size, responses)
    cache = kv_cache_bytes(model, rows=rows, length=config.data.seq_len, tp=rollout.tp, dtype=config.engine_dtype)
    full = replace(step.plan, activation_checkpointing=ActivationCheckpointingConfig(mode="full"))
    layers = layers_memory(model, full, tokens=rows * (config.data.seq_len - rollout.max_new_tokens))
    prompts = max((layer.forward for layer in layers or ()), default=0)
    generate = {**({} if rollout.sleep else rest), **engine, "KV cache": cache, "activations": prompts}
    return [sync, Moment("generate", "the prompts", generate)]
