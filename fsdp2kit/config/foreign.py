"""What transformers, TRL, axolotl, torchtune, torchtitan, llama-factory, accelerate and FSDP1 call our keys.

`migrate` translates their configurations with these tables; here they answer a key or a value that is not ours.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# What files of others call a field: by its key here, or by a word for it where it has none to itself.
NAMES = {
    "processes": "num_processes world_size num_gpus n_gpus nproc ngpus",
    "processes of a node": "nproc_per_node gpus_per_node num_gpus_per_node n_gpus_per_node",
    "nodes": "num_machines nnodes num_nodes nodes",
    "host": "main_process_ip master_addr",
    "port": "main_process_port master_port",
    "run.dir": "output_dir run_dir save_dir out_dir output_path logging_dir dump_folder job.dump_folder",
    "run.seed": "seed random_seed",
    "run.deterministic": "full_determinism deterministic",
    "run.timeout_minutes": "ddp_timeout",
    "model.path": "model_path model_name_or_path model_name model_id model base_model hf_model model.path model.name "
    "pretrained_model_name_or_path model.model_name_or_path checkpointer.checkpoint_dir hf_assets_path "
    "model.hf_assets_path",
    "model.tokenizer": "tokenizer_path tokenizer_name tokenizer tokenizer_name_or_path tokenizer.path",
    "model.freeze": "freeze_layers freeze frozen_params freeze_modules",
    "frozen layers": "num_freeze_layers",
    "model.weights": "from_scratch random_init random_weights init_random train_from_scratch",
    "model.attention": "attn_implementation attention attn_impl model.attn_implementation attention_type",
    "flash attention": "flash_attention_2 flash_attention flash_attn flash_attn_2",
    "model.trust_remote_code": "trust_remote_code model.trust_remote_code",
    "model.liger": "liger liger_kernel",
    "model.adapter": "adapter_name_or_path lora_model_dir",
    "lora.rank": "lora_rank lora_r lora.r lora.rank lora.lora_r lora_config.r peft_config.r",
    "lora.alpha": "lora_alpha lora.alpha lora.lora_alpha lora_config.lora_alpha peft_config.lora_alpha",
    "lora.dropout": "lora_dropout lora.dropout lora.lora_dropout lora_config.lora_dropout peft_config.lora_dropout",
    "lora.target_modules": "lora_target lora_target_modules lora_attn_modules lora.target_modules "
    "lora.lora_target_modules lora_config.target_modules peft_config.target_modules",
    "lora.modules_to_save": "lora_modules_to_save lora.modules_to_save lora_config.modules_to_save",
    "lora.rslora": "rslora lora_use_rslora peft_use_rslora lora.use_rslora",
    "lora.dora": "dora peft_use_dora lora.use_dora",
    "lora.quantize": "load_in_4bit qlora",
    "all linear layers": "lora_target_linear",
    "adapter switch": "lora peft",
    "adapter method": "adapter finetuning_type peft_method",
    "mesh.cp": "cp cp_size context_parallel_size context_parallel_degree sequence_parallel_degree "
    "sequence_parallel_size",
    "mesh.dp_shard": "sharding_group_size dp_shard_size dp_shard data_parallel_shard_degree",
    "mesh.dp_replicate": "replica_group_size dp_replicate_size dp_replicate data_parallel_replicate_degree",
    "fsdp.reshard_after_forward": "reshard_after_forward",
    "fsdp.offload": "cpu_offload offload_params cpu_offload.offload_params offload param_offload",
    "offload of the optimizer": "optimizer_offload offload_optimizer",
    "fsdp.unit": "auto_wrap_policy wrap_policy wrapping_policy auto_wrap",
    "fsdp.min_params": "min_num_params size_min_params min_params min_wrap_params wrap_policy.min_num_params",
    "fsdp.unit_classes": "transformer_layer_cls_to_wrap transformer_cls_names_to_wrap transformer_layer_cls "
    "wrap_policy.transformer_layer_cls_to_wrap wrap_modules",
    "fsdp.ignored_modules": "ignored_modules ignored_states ignored_params ignored_parameters",
    "fsdp.strategy": "sharding_strategy strategy shard_strategy",
    "fsdp": "fsdp",
    "pure_bf16": "pure_bf16",
    "fsdp.param_dtype": "param_dtype",
    "mixed precision": "mixed_precision mixed_precision_policy mp_policy precision amp",
    "fp16": "fp16",
    "bf16": "bf16",
    "dtype": "dtype torch_dtype compute_dtype model_dtype model.torch_dtype model.dtype",
    "fsdp.reduce_dtype": "reduce_dtype grad_reduce_dtype",
    "fsdp.output_dtype": "output_dtype",
    "fsdp.storage_dtype": "storage_dtype master_weight_dtype master_dtype",
    "fsdp.backward_prefetch": "backward_prefetch backward_prefetch_policy",
    "fsdp.forward_prefetch": "forward_prefetch",
    "fsdp.reduce_every_micro_batch": "sync_each_batch gradient_accumulation_kwargs.sync_each_batch "
    "reduce_every_micro_batch",
    "no_sync": "no_sync",
    "fsdp.class_dtypes": "module_classes_to_ignore _module_classes_to_ignore",
    "activation_checkpointing.mode": "activation_checkpointing gradient_checkpointing model.gradient_checkpointing "
    "activation_checkpoint.mode",
    "activation_checkpointing.every": "activation_checkpointing_every selective_checkpointing ac_every "
    "checkpoint_every_n_layers",
    "activation_checkpointing.offload": "activation_offloading activation_cpu_offload activation_offload "
    "offload_activations",
    "compile.enabled": "torch_compile compile dynamo_config.dynamo_backend",
    "data.path": "data_path dataset_path train_file train_data dataset dataset_name train_path datasets dataset_id "
    "train_data_path dataset_name_or_path data_files data.path dataset.path dataset.source datasets.path "
    "train_dataset",
    "torchtune builder": "dataset._component_",
    "text column": "dataset_text_field text_column text_field text_column_name datasets.field",
    "messages column": "datasets.field_messages",
    "prompt column": "datasets.type.field_instruction",
    "completion column": "datasets.type.field_output",
    "data.format": "data_format dataset_format dataset_type dataset.type datasets.type",
    "data.split": "train_split dataset_split dataset.split split dataset_train_split datasets.split",
    "data.shuffle": "shuffle dataset.shuffle",
    "data.streaming": "streaming dataset.streaming",
    "data.train_on": "train_on_inputs train_on_input dataset.train_on_input",
    "answers only": "assistant_only_loss completion_only_loss",
    "data.seq_len": "max_seq_length max_seq_len seq_length seq_len sequence_length sequence_len context_length "
    "block_size model_max_length max_length cutoff_len tokenizer.max_seq_len data.seq_len",
    "data.pack": "packing packed sample_packing dataset.packed pack",
    "batching strategy": "batching_strategy",
    "batch per device": "per_device_train_batch_size train_batch_size batch_size_training per_device_batch_size "
    "batch_size local_batch_size",
    "train.global_batch_size": "global_batch_size global_train_batch_size total_batch_size effective_batch_size",
    "accumulation": "gradient_accumulation_steps grad_accum_steps accumulation_steps grad_accumulation "
    "gradient_accumulation",
    "train.micro_batch_size": "micro_batch_size device_train_microbatch_size train_micro_batch_size_per_gpu",
    "train.steps": "max_steps steps num_steps train_steps max_train_steps max_train_step num_training_steps "
    "total_steps iterations max_iters num_iterations",
    "train.epochs": "num_train_epochs num_epochs epochs max_epochs",
    "train.max_grad_norm": "max_grad_norm gradient_clipping_threshold grad_clip max_norm grad_norm_clip "
    "gradient_clip_val clip_grad_norm_value grad_clip_norm",
    "clipping": "clip_grad_norm gradient_clipping clip_grad clip_gradients",
    "train.log_every": "logging_steps log_every log_interval log_every_n_steps logging_interval log_freq "
    "metrics.log_freq",
    "optimizer.betas": "betas adam_betas optimizer.betas",
    "first beta": "adam_beta1 beta1",
    "second beta": "adam_beta2 beta2",
    "optimizer.name": "optim optimizer optimizer_name optimizer_type optimizer.name optimizer.type "
    "optimizer._component_",
    "optimizer.lr": "learning_rate lr optimizer.lr optimizer.learning_rate",
    "optimizer.eps": "adam_epsilon eps adam_eps optimizer.eps",
    "optimizer.weight_decay": "weight_decay optimizer.weight_decay wd",
    "lr_schedule.min_lr_ratio": "min_lr_ratio min_lr_rate cosine_min_lr_ratio lr_scheduler_kwargs.min_lr_rate "
    "lr_scheduler.min_lr_factor",
    "lr_schedule.warmup_steps": "warmup_steps num_warmup_steps lr_warmup_steps warmup_iters warmup "
    "lr_scheduler.num_warmup_steps lr_scheduler.warmup_steps",
    "lr_schedule.warmup_ratio": "warmup_ratio warmup_fraction warmup_proportion",
    "lr_schedule.name": "lr_scheduler_type lr_scheduler lr_schedule scheduler scheduler_type scheduler.name "
    "lr_scheduler.name lr_scheduler._component_",
    "eval.path": "eval_file eval_path eval_data eval_data_path eval_dataset validation_file val_file val_data "
    "eval_dataset_path validation_path",
    "eval.split": "eval_split validation_split test_split eval_dataset_split dataset_test_split",
    "held-out share": "val_set_size val_size",
    "evaluates": "eval_strategy evaluation_strategy do_eval run_validation evaluate",
    "eval.every": "eval_steps eval_every eval_interval eval_freq eval_every_n_steps val_interval",
    "eval.steps": "max_eval_step max_eval_steps eval_iters eval_batches max_eval_batches",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_every checkpoint_interval save_every_n_steps "
    "ckpt_every checkpoint.interval",
    "save strategy": "save_strategy",
    "checkpoint.keep": "save_total_limit keep_last max_checkpoints keep_checkpoints",
    "checkpoint.export_hf": "save_final save_final_model save_model save_full_model save_full_state_dict",
    "reports": "report_to logger tracker wandb.enabled wandb.enable wandb.disabled",
    "wandb.mode": "wandb wandb_enabled",
    "wandb.project": "wandb_project project_name project wandb.project",
    "wandb.name": "run_name wandb_run_name wandb_name wandb.name experiment_name",
    "profile.enabled": "profiler profile profiling",
}

# Fields that need no key, or can have none: why, and their names. docs/fsdp1_to_fsdp2.md says more of FSDP1's own.
WITHOUT_KEY = {
    "no counterpart: docs/fsdp1_to_fsdp2.md says why": "limit_all_gathers sync_module_states orig_params "
    "param_init_fn device_id device_map buffer_dtype keep_low_precision_grads process_group device_mesh "
    "cpu_ram_efficient_loading low_cpu_fsdp low_cpu_mem_usage ddp_find_unused_parameters",
    "every unit casts its floating-point inputs to fsdp.param_dtype": "cast_forward_inputs cast_root_forward_inputs",
    "FSDP2 is what runs here": "version deepspeed_config",
    "fsdp.strategy and [mesh] say so": "hsdp",
    "checkpoints are sharded, hold the optimizer and resume on any mesh; hf/ is the whole model, as "
    "safetensors": "state_dict_type checkpoint_type final_state_dict_type rank0_only offload_to_cpu save_optimizer "
    "save_only_model save_safetensors",
    "checkpoints are in run.dir, or in checkpoint.dir": "dist_checkpoint_root_folder dist_checkpoint_folder",
    'run.resume = "auto" goes on from the newest here, "never" does not; tools/hf_to_dcp.py takes FSDP1 '
    "checkpoints": "resume_from_checkpoint resume resume_from overwrite_output_dir",
    "torchrun takes it on the command line": "machine_rank rdzv_backend same_network compute_environment",
    "CUDA_VISIBLE_DEVICES, TORCH_DISTRIBUTED_DEBUG=DETAIL and numactl do that": "gpu_ids debug cpu_affinity",
    "the recipe is the script": "main_training_function",
    "CPUs are used where there is no CUDA device": "cpu",
    "TPUs are not supported": "downcast_bf16 tpu_env tpu_use_cluster tpu_use_sudo xla",
    "torch's non-reentrant checkpointing is used": "gradient_checkpointing_kwargs "
    "gradient_checkpointing_kwargs.reentrant",
    'model.attention = "auto" is the default': "fast_kernels",
    "columns that the format does not name are not read": "remove_unused_columns",
    "float32 matmuls keep torch's own setting": "tf32",
    "train.log_every, eval.every and checkpoint.every count steps": "logging_strategy logging_first_step "
    "evals_per_epoch saves_per_epoch",
    "evaluation runs in batches of train.micro_batch_size": "per_device_eval_batch_size eval_batch_size "
    "val_batch_size eval_micro_batch_size",
    "traces are in trace/ of run.dir": "profiler_dir profile_dir",
    "every row is data.seq_len long": "pad_to_sequence_len",
    "the model's and the tokenizer's own files say so": "model_type tokenizer_type",
    "a row of a conversation says it itself": "datasets.conversation datasets.chat_template datasets.ds_type "
    "datasets.message_field_role datasets.message_field_content",
    "rows are tokenised ahead and cached: data.workers, data.prefetch": "num_workers_dataloader "
    "dataloader_num_workers num_workers dataloader_pin_memory pin_memory dataset_prepared_path",
    "tensor parallelism is not offered: FSDP shards parameters, mesh.cp sequences": "tp_size tp_degree "
    "tensor_parallel_size tensor_parallel_dim tensor_parallel_degree tp",
    "pipeline parallelism is not offered: FSDP shards parameters, mesh.cp sequences": "pp pp_size pp_degree "
    "pipeline_parallel_size pipeline_parallel_degree",
    "expert parallelism is not offered: FSDP shards experts as other parameters": "ep ep_size ep_degree "
    "expert_parallel_size expert_parallel_degree",
}


# Fields without which something else is trained, of which `migrate` warns: what becomes of them, and their names.
NOT_OFFERED = {
    "quantised weights are not offered": "quantization load_in_8bit",
}

# What to write instead of what has no key to itself, by the word that `NAMES` has for it.
_INSTEAD = {
    "processes": "torchrun says it: torchrun --nproc-per-node N -m fsdp2kit.run TOML",
    "processes of a node": "torchrun says it: torchrun --nproc-per-node N -m fsdp2kit.run TOML",
    "nodes": "torchrun says it: --nnodes N",
    "host": "torchrun says it: --rdzv-endpoint HOST:PORT",
    "port": "torchrun says it: --rdzv-endpoint HOST:PORT",
    "frozen layers": 'write model.freeze = ["*.layers.[0-7].*"]',
    "all linear layers": 'write lora.target_modules = "all-linear", which is the default',
    "adapter switch": "write lora.rank, which trains LoRA adapters",
    "adapter method": "write lora.rank, which trains LoRA adapters; other kinds are not offered",
    "flash attention": 'write model.attention = "flash_attention_2", or leave "auto"',
    "offload of the optimizer": 'write fsdp.offload = "optimizer"',
    "fsdp": "FSDP2 is always on; fsdp.strategy says how it shards",
    "pure_bf16": 'write fsdp.param_dtype = "bfloat16", the default; fsdp.storage_dtype = "bfloat16" also stores it so',
    "mixed precision": 'write fsdp.param_dtype = "bfloat16", which is the default',
    "bf16": 'write fsdp.param_dtype = "bfloat16", which is the default',
    "fp16": 'write fsdp.param_dtype = "bfloat16": float16 needs a gradient scaler, which is not offered',
    "dtype": "write fsdp.param_dtype, in which is computed; fsdp.storage_dtype is that of the shards",
    "no_sync": "gradients are reduced once a step; fsdp.reduce_every_micro_batch = true reduces them more often",
    "torchtune builder": "write data.path and data.format",
    "text column": "write data.columns.text",
    "messages column": "write data.columns.messages",
    "prompt column": "write data.columns.prompt",
    "completion column": "write data.columns.completion",
    "answers only": 'write data.train_on = "assistant", which is the default',
    "batching strategy": "write data.pack = true or false",
    "batch per device": "write train.micro_batch_size (sequences in one forward pass of a rank) and "
    "train.global_batch_size (sequences in a step of all ranks)",
    "accumulation": "it is derived: train.global_batch_size ÷ (data-parallel ranks × train.micro_batch_size)",
    "clipping": "write train.max_grad_norm; 0 does not clip",
    "first beta": "write optimizer.betas = [0.9, 0.95]",
    "second beta": "write optimizer.betas = [0.9, 0.95]",
    "held-out share": "write eval.split = 0.02, a share of the rows, or a number of them",
    "evaluates": "write eval.every, and eval.path or another eval.split",
    "save strategy": "write checkpoint.every, in steps or as a time",
    "reports": 'write wandb.mode = "online" or "disabled"',
}

# What other tools call a whole section.
_SECTIONS = {
    "train": "training trainer train_config training_args training_arguments args hyperparameters",
    "data": "dataset datasets",
    "mesh": "parallelism parallelism_config parallel parallel_dims distributed",
    "fsdp": "fsdp_config fsdp_plugin fsdp_args fsdp2 deepspeed zero mixed_precision",
    "activation_checkpointing": "activation_checkpoint gradient_checkpointing",
    "optimizer": "optim",
    "lr_schedule": "lr_scheduler scheduler schedule",
    "lora": "lora_config peft_config peft",
    "eval": "evaluation validation",
    "checkpoint": "checkpointing checkpointer ckpt",
    "wandb": "logging logger metrics metric_logger",
    "profile": "profiler profiling",
    "run": "job",
}

# Values by what other tools call them.
STRATEGY_WORDS = {
    "full_shard 1 zero3 zero_3 zero_stage_3": "full_shard",
    "shard_grad_op 2 zero2 zero_2 zero_stage_2": "shard_grad_op",
    "no_shard 3 ddp": "no_shard",
    "hybrid_shard 4": "hybrid_shard",
    "hybrid_shard_zero2 _hybrid_shard_zero2 5": "hybrid_shard_zero2",
}
DTYPE_WORDS = {
    "float32 fp32 float 32 32_true": "float32",
    "bfloat16 bf16 bf16_mixed amp_bf16": "bfloat16",
    "float16 fp16 half 16 16_mixed amp_fp16": "float16",
}
ADAMW_WORDS = {
    "adamw adam_w adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_fused fused_adamw "
    "adamw_torch_xla adamw_torch_npu_fused": "adamw",
    "adamw_8bit adamw_bnb_8bit adamw_torch_8bit adamw8bit": "adamw_8bit",
}

# Beginnings of names that say nothing: fsdp_use_orig_params, mixed_precision_reduce_dtype.
_PREFIXES = re.compile(r"^((fsdp|use|enable|parallelism_config)_|(mixed_precision|mp)_+(?=.*(dtype|classes)))+")


def spellings(meanings: Mapping[str, Any]) -> dict[str, Any]:
    """The meaning of each word, from that of all spellings of it (separated by spaces)."""
    return {word: meaning for words, meaning in meanings.items() for word in words.split()}


def snake_case(key: str) -> str:
    """``trainBatchSize``, ``--train-batch-size`` and ``TRAIN_BATCH_SIZE`` as ``train_batch_size``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.lstrip("-")).replace("-", "_").lower()


def plain_name(key: str) -> str:
    """A key in `snake_case`, without a beginning that says nothing: ``fsdp_offload`` → ``offload``."""
    return _PREFIXES.sub("", snake_case(key))


def advise_on_path(location: Sequence[str], known: Collection[str]) -> str | None:
    """What to write instead of a key that other tools have in this very section; None: no tool that we know of."""
    return _reason(".".join(map(snake_case, location)), location[-1], known) if len(location) > 1 else None


def advise_on_key(location: Sequence[str], value: Any, known: Collection[str]) -> str | None:
    """What to write instead of a key or section that is not ours; None: no tool that we know of has it.

    Args:
        location: the parts of the key, ``["optimizer", "learning_rate"]``.
        value: what is given for it; of an unknown section its keys are looked up.
        known: the keys that there are.
    """
    section = SECTION_OF.get(snake_case(location[0]), location[0])
    is_foreign = section != location[0] and section in known
    if len(location) == 1 and isinstance(value, Mapping):
        inner = (advise_on_key([*location, name], item, known) for name, item in value.items())
        return next(filter(None, inner), f"[{location[0]}] is [{section}] here" if is_foreign else None) or _reason(
            snake_case(location[0]), location[0], known
        )
    if is_foreign and f"{section}.{location[-1]}" in known:
        return f"{location[-1]} is {section}.{location[-1]} here"
    name = plain_name(location[-1])
    for candidate in (".".join([*map(snake_case, location[:-1]), name]), name):
        if reason := _reason(candidate, location[-1], known):
            return reason
    return None


def _reason(foreign: str, name: str, known: Collection[str]) -> str | None:
    """What to write instead of a foreign name."""
    for slot in _SLOTS.get(foreign, ()):
        if slot in known:
            return f"{name} is {slot} here"
        if slot in _INSTEAD or slot not in NAMES:
            return f"{name}: {_INSTEAD.get(slot, slot)}"
    return None


def advise_on_value(given: Any, options: Collection[str]) -> str | None:
    """The one of ``options`` that another tool calls ``given``; None where that is none."""
    word = re.sub(r"[\s-]+", "_", str(given).strip().rpartition(".")[2].lower())
    meant = next((table[word] for table in _VALUES if table.get(word) in options), word)
    return meant if meant in options else None


# Each foreign name, with what `NAMES` files it under, or with why it has no key.
_SLOTS: dict[str, list[str]] = {}
for _slot, _names in (NAMES | WITHOUT_KEY | NOT_OFFERED).items():
    for _name in _names.split():
        _SLOTS.setdefault(_name, []).append(_slot)
SECTION_OF = spellings({names: section for section, names in _SECTIONS.items()})
# Sections that only one recipe has.
RECIPE_OF = {"dpo": "dpo", "distill": "distill", **dict.fromkeys(("rollout", "weight_sync", "grpo", "reward"), "grpo")}
_VALUES = [spellings(table) for table in (STRATEGY_WORDS, DTYPE_WORDS, ADAMW_WORDS)]
