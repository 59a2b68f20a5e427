"""Suggest the nearest valid name in errors."""

import difflib
from collections.abc import Iterable

OTHER_LIBRARIES_NAMES = {
    "accelerator": "",
    "accelerator_type": "type",
    "accumulate_grad_batches": "accumulate",
    "adam_beta2": "beta2",
    "always_save_checkpoint": "",
    "batch_size": "batch",
    "bf16": "precision",
    "block_size": "context",
    "callbacks": "hooks",
    "check_val_every_n_epoch": "eval_every",
    "ckpt_path": "run",
    "compile": "",
    "dataset": "data",
    "dataset_name": "data",
    "default_root_dir": "run",
    "dropout_rate": "dropout",
    "dtype": "precision",
    "eval_interval": "eval_every",
    "eval_steps": "eval_every",
    "eval_strategy": "eval_every",
    "fp16": "precision",
    "grad_clip": "clip",
    "gradient_accumulation_steps": "accumulate",
    "gradient_checkpointing": "",
    "gradient_clip_val": "clip",
    "hidden_size": "width",
    "learning_rate": "lr",
    "log_every_n_steps": "",
    "log_interval": "",
    "logger": "loggers",
    "logging_steps": "",
    "lr_decay_iters": "steps",
    "lr_scheduler_type": "schedule",
    "machine_type": "type",
    "max_epochs": "epochs",
    "max_grad_norm": "clip",
    "max_iters": "steps",
    "max_length": "context",
    "max_new_tokens": "tokens",
    "max_seq_length": "context",
    "max_steps": "steps",
    "min_delta": "least",
    "min_lr": "lr_end",
    "model_name_or_path": "init_from",
    "monitor": "metric",
    "n_embd": "width",
    "n_head": "heads",
    "n_layer": "layers",
    "num_attention_heads": "heads",
    "num_epochs": "epochs",
    "num_hidden_layers": "layers",
    "num_nodes": "hosts",
    "num_steps": "steps",
    "num_train_epochs": "epochs",
    "num_workers": "",
    "optim": "optimizer",
    "out_dir": "run",
    "output_dir": "run",
    "per_device_eval_batch_size": "eval_batch",
    "per_device_train_batch_size": "batch",
    "report_to": "wandb",
    "resume_from_checkpoint": "run",
    "save_steps": "save_every",
    "save_strategy": "save_every",
    "save_total_limit": "keep",
    "strategy": "shard",
    "tpu_cores": "devices",
    "train_batch_size": "batch",
    "train_file": "data",
    "val_check_interval": "eval_every",
    "vocab_size": "vocab",
    "wandb_log": "wandb",
    "wandb_project": "wandb",
    "warmup_iters": "warmup",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
}
"""Name of an option in nanoGPT, Lightning, Keras or Transformers → ours; empty where there is none."""


def nearest_name(wrong: str, known: Iterable[str], min_similarity: float = 0.5) -> str | None:
    """Return the known name most similar to a wrong one, or None. Leading dashes do not count."""
    bare = {_bare(name): name for name in sorted(known)}
    name = _bare(wrong.lower())
    if (ours := OTHER_LIBRARIES_NAMES.get(name)) in ("", *bare):
        return bare.get(ours)
    near = difflib.get_close_matches(name, bare, n=1, cutoff=min_similarity)
    return bare[near[0]] if near else None


def _bare(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return the end of an error sentence: the nearest known name, or all known names."""
    known = sorted(known)
    if near := nearest_name(wrong, known):
        return f"did you mean {near}?"
    return f"known: {', '.join(known)}" if known else "there are none"
