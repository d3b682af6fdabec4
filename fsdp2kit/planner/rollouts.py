"""Memory beside a rollout engine: while weights go to it, while it generates, and of its cache."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from fsdp2kit.config.facts import EngineNeeds
from fsdp2kit.config.schema import ActivationCheckpointingConfig, TrainingConfig
from fsdp2kit.model.flops import attention_layers, head_widths
from fsdp2kit.model.inspect import value_of
from fsdp2kit.parallel.context_parallel.batch import layer_kinds, layer_windows
from fsdp2kit.planner.activations import item_bytes, layers_memory
from fsdp2kit.planner.memory import Moment
from fsdp2kit.planner.sizes import StepMemory, at_rest, engine_bytes


def kv_cache_bytes(model: PreTrainedModel, *, rows: int, length: int, tp: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of the keys and values that one rank caches for ``rows`` sequences of ``length`` tokens.

    Heads are divided over ``tp``; each rank keeps at least one. A layer with a sliding window keeps that many tokens
    at most. A layer without attention keeps none; its state, of a fixed size, is not counted. Latent attention caches
    the expanded keys and values, as transformers does.
    """
    config = model.config.get_text_config()
    kinds = layer_kinds(config)
    windows = layer_windows(config)
    total = 0
    for number, layer in attention_layers(config).items():
        heads = value_of(layer, "num_key_value_heads") or value_of(layer, "num_attention_heads")
        if heads:
            tokens = min(length, windows[kinds[number]] or length)
            total += -(-heads // tp) * sum(head_widths(layer)) * tokens
    return total * rows * item_bytes(dtype)


def rollout_moments(
    engine: EngineNeeds, config: TrainingConfig, model: PreTrainedModel, step: StepMemory
) -> list[Moment]:
    """What is allocated while weights go to the engine, and while it generates; of a server, the trainer's side alone.

    Prompts are taken to be as long as ``data.seq_len`` lets them, and every response to be cut. Their activations are
    those of one layer without gradients, where a formula describes it.
    """
    weights = engine_bytes(engine, model)
    largest = max(parameter.numel() for parameter in model.parameters()) * item_bytes(engine.dtype)
    rest = at_rest(step)
    embedded = {"engine": weights} if weights else {}
    buckets = {"weight buckets": 2 * engine.bucket_bytes + largest}
    sync = Moment("sync", "a bucket loads, the next is gathered", {**rest, **embedded, **buckets})
    if not weights:
        return [sync]
    responses = -(-config.train.global_batch_size * engine.updates // step.plan.sizes.world_size) * engine.tp
    if config.eval.every:  # an evaluation may ask more prompts than a step does
        responses = engine.batch_size
    rows = min(engine.batch_size, responses)
    cache = kv_cache_bytes(model, rows=rows, length=config.data.seq_len, tp=engine.tp, dtype=engine.dtype)
    full = replace(step.plan, activation_checkpointing=ActivationCheckpointingConfig(mode="full"))
    layers = layers_memory(model, full, tokens=rows * engine.longest_prompt)
    prompts = 0 if None in layers else max(layer.forward for layer in layers if layer is not None)
    generate = {**({} if engine.sleeps else rest), **embedded, "KV cache": cache, "activations": prompts}
    return [sync, Moment("generate", "the prompts", generate)]
