"""What is trained and what is kept of it → ``[model]``, ``[run]``, ``[checkpoint]``, ``[wandb]``, ``[profile]``."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import Fields
from fsdp2kit.migrate.values import as_bool, as_int, as_words, word

_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def translate_model(fields: Fields, draft: Draft, *, given: str | None, folder: Path) -> None:
    """``[model]``; ``given`` is the command line's, for files that name none."""
    path = fields.take("model_path", "model_name_or_path", "model_name", "model_id", "model", "base_model", "hf_model",
                       "pretrained_model_name_or_path", "model.path", "model.name", "model.model_name_or_path",
                       "checkpointer.checkpoint_dir")  # fmt: skip
    config = fields.take_under("model_config")
    from_config = any(field.name == "model_type" for field in config)
    if given is not None:
        draft.set("model.path", given, "--model" + (f"; the file has {path}" if path else ""))
    elif path is not None:
        draft.was("model.path", beside(str(path.value), folder), path)
    elif from_config:
        draft.set("model.weights", "random", "a model from a config")
    else:
        draft.set("model.path", "your-org/your-model", "not in the file: what your script loads")
        draft.needs.append("model.path=MODEL")
    for field in config:
        if field.value is None:
            draft.note(field, "null: the default")
        else:
            draft.put("model.config", field.name, field.value, f"was {field}")
    scratch = fields.take("from_scratch", "random_init", "random_weights", "init_random", "train_from_scratch")
    if scratch is not None and as_bool(fields, scratch):
        draft.was("model.weights", "random", scratch)
    else:
        draft.note(scratch, "the model's own weights")
    tokenizer = fields.take(
        "tokenizer_path", "tokenizer_name", "tokenizer", "tokenizer_name_or_path", "tokenizer.path"
    )
    if tokenizer is not None and Path(str(tokenizer.value)).suffix in (".model", ".json"):
        draft.note(tokenizer, "a Hugging Face directory is needed; the model's own is used")
    elif tokenizer is not None:
        draft.was("model.tokenizer", beside(str(tokenizer.value), folder), tokenizer)
    _translate_attention(fields, draft)
    trust = fields.take("trust_remote_code", "model.trust_remote_code")
    if trust is not None:
        draft.was("model.trust_remote_code", as_bool(fields, trust), trust)
    _translate_frozen(fields, draft)


def translate_kernels(fields: Fields, draft: Draft) -> None:
    """Liger's kernels."""
    liger = fields.take("use_liger", "use_liger_kernel", "liger", "enable_liger")
    if liger is not None:
        draft.was("model.liger", as_bool(fields, liger), liger, "norms, RoPE, MLPs; of the loss: model.loss_kernel")


def _translate_attention(fields: Fields, draft: Draft) -> None:
    named = fields.take("attn_implementation", "attention", "attn_impl", "model.attn_implementation", "attention_type")
    flash = fields.take("use_flash_attention_2", "use_flash_attention", "flash_attention", "use_flash_attn",
                        "flash_attn", "use_flash_attn_2")  # fmt: skip
    fast = fields.take("use_fast_kernels")
    if named is not None and word(named.value) in _ATTENTION:
        draft.was("model.attention", word(named.value), named)
    elif named is not None:
        draft.was("model.attention", "sdpa", named)
    if flash is not None and named is None:
        draft.was("model.attention", "flash_attention_2" if as_bool(fields, flash) else "sdpa", flash)
    else:
        draft.note(flash, "model.attention")
    draft.note(fast, 'model.attention = "auto" is the default')


def _translate_frozen(fields: Fields, draft: Draft) -> None:
    """llama-recipes' ``freeze_layers`` with ``num_freeze_layers``, or a list of names."""
    frozen = fields.take("freeze_layers", "freeze", "frozen_params", "freeze_modules")
    number = fields.take("num_freeze_layers")
    if frozen is not None and isinstance(frozen.value, list):
        draft.was("model.freeze", as_words(frozen.value), frozen)
    elif frozen is not None and as_bool(fields, frozen):
        layers = as_int(fields, number) if number else 1
        draft.was("model.freeze", [f"*.layers.{at}.*" for at in range(layers)], frozen, str(number or ""))
        number = None
    else:
        draft.note(frozen, "every parameter is trained")
    draft.note(number, "nothing is frozen")


def translate_run(fields: Fields, draft: Draft, *, stem: str) -> None:
    """``[run]``, ``[checkpoint]``, ``[wandb]``, ``[profile]``."""
    folder = fields.take("output_dir", "run_dir", "save_dir", "out_dir", "output_path", "logging_dir")
    if folder is not None:
        draft.was("run.dir", str(folder.value), folder)
    else:
        draft.set("run.dir", f"runs/{stem}", "not in the file")
    seed = fields.take("seed", "random_seed")
    if seed is not None:
        draft.was("run.seed", as_int(fields, seed), seed)
    exact = fields.take("full_determinism", "deterministic")
    if exact is not None:
        draft.was("run.deterministic", as_bool(fields, exact), exact)
    wait = fields.take("ddp_timeout")
    if wait is not None:
        draft.was("run.timeout_minutes", as_int(fields, wait) / 60, wait, "seconds")
    resume = fields.take("resume_from_checkpoint", "resume", "resume_from")
    draft.note(resume, 'run.resume = "auto" goes on from the newest here; tools/hf_to_dcp.py takes FSDP1 checkpoints')
    _translate_checkpoints(fields, draft)
    _translate_reports(fields, draft)


def _translate_checkpoints(fields: Fields, draft: Draft) -> None:
    every = fields.take("save_steps", "save_every", "save_interval", "checkpoint_every", "checkpoint_interval",
                        "save_every_n_steps", "ckpt_every")  # fmt: skip
    when = fields.take("save_strategy")
    draft.note(when, "checkpoint.every says when, in steps; 0: at the end")
    if every is not None and not (when and word(when.value) in ("no", "epoch")) and as_int(fields, every) >= 0:
        draft.was("checkpoint.every", as_int(fields, every), every)
    else:
        draft.note(every, "the run writes one checkpoint, at its end")
    keep = fields.take("save_total_limit", "keep_last", "max_checkpoints", "keep_checkpoints")
    if keep is not None and as_int(fields, keep) >= 1:
        draft.was("checkpoint.keep", as_int(fields, keep), keep)
    else:
        draft.note(keep, "checkpoint.keep is at least 1")
    final = fields.take("save_final", "save_final_model", "save_model", "save_full_model", "save_full_state_dict")
    if final is not None:
        draft.was("checkpoint.export_hf", "final" if as_bool(fields, final) else "never", final)
    kind = fields.take("state_dict_type", "checkpoint_type", "final_state_dict_type")
    draft.note(
        kind, "checkpoints are sharded (DCP, resumable on any mesh); hf/ is the full state dict, as safetensors"
    )
    for name in ("dist_checkpoint_root_folder", "dist_checkpoint_folder"):
        draft.note(fields.take(name), "checkpoints are in run.dir, or in checkpoint.dir")


def _translate_reports(fields: Fields, draft: Draft) -> None:
    report = fields.take("report_to", "logger", "tracker")
    use = fields.take("use_wandb", "wandb", "enable_wandb", "wandb_enabled")
    project = fields.take("wandb_project", "project_name", "project", "wandb.project")
    name = fields.take("run_name", "wandb_run_name", "wandb_name", "wandb.name", "experiment_name")
    names = [word(one) for one in as_words(report.value)] if report else []
    wanted = as_bool(fields, use) if use else bool({"wandb", "all"} & set(names)) if report else project is not None
    told = use or report
    if told is not None:
        draft.was("wandb.mode", "auto" if wanted else "disabled", told)
    elif not wanted:
        draft.set("wandb.mode", "disabled", "not in the file")
    for key, field in (("project", project), ("name", name)):
        if field is not None:
            draft.was(f"wandb.{key}", str(field.value), field)
    trace = fields.take("use_profiler", "profile", "profiler", "enable_profiler", "enable_profiling")
    if trace is not None:
        draft.was("profile.enabled", as_bool(fields, trace), trace)
    draft.note(fields.take("profiler_dir", "profile_dir"), "traces are in trace/ of run.dir")


def beside(path: str, folder: Path) -> str:
    """A path that was relative to where one stood, relative to the TOML's folder; hub ids and others as they are."""
    if "://" in path or Path(path).is_absolute() or not Path(path).exists():
        return path
    return os.path.relpath(path, folder)
