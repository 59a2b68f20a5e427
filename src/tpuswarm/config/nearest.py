"""Suggest the nearest valid name in errors."""

import difflib
from collections.abc import Iterable

OTHER_LIBRARIES_NAMES = {
    "accumulate_grad_batches": "accumulate",
    "batch_size": "batch",
    "callbacks": "hooks",
    "ckpt_path": "run",
    "default_root_dir": "run",
    "dropout_rate": "dropout",
    "eval_steps": "eval_every",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clip_val": "clip",
    "learning_rate": "lr",
    "logger": "loggers",
    "max_epochs": "epochs",
    "max_grad_norm": "clip",
    "max_steps": "steps",
    "min_delta": "least",
    "monitor": "metric",
    "n_layer": "layers",
    "num_epochs": "epochs",
    "num_nodes": "hosts",
    "num_steps": "steps",
    "num_train_epochs": "epochs",
    "output_dir": "run",
    "resume_from_checkpoint": "run",
    "save_steps": "save_every",
    "save_total_limit": "keep",
    "strategy": "shard",
    "tpu_cores": "devices",
    "val_check_interval": "eval_every",
}
"""Name of an option in Lightning, Keras or Transformers → ours."""


def nearest_name(wrong: str, known: Iterable[str], min_similarity: float = 0.5) -> str | None:
    """Return the known name most similar to a wrong one, or None. Leading dashes do not count."""
    known, wrong = sorted(known), wrong.lower()
    bare = {name.lstrip("-"): name for name in known}
    if ours := OTHER_LIBRARIES_NAMES.get(wrong.lstrip("-").replace("-", "_")):
        for spelled in (ours, ours.replace("_", "-")):
            if spelled in bare:
                return bare[spelled]
    near = difflib.get_close_matches(wrong.lstrip("-"), bare, n=1, cutoff=min_similarity)
    return bare[near[0]] if near else None


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return the end of an error sentence: the nearest known name, or all known names."""
    known = sorted(known)
    if near := nearest_name(wrong, known):
        return f"did you mean {near}?"
    return f"known: {', '.join(known)}" if known else "there are none"
