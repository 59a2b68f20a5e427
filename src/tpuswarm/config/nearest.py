"""The nearest right name, for errors that help."""

import difflib
from collections.abc import Iterable

ALSO = {
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
    "val_check_interval": "eval_every",
}
"""What other programs (Lightning, Keras, Transformers) call an option of ours."""


def nearest(wrong: str, known: Iterable[str], least: float = 0.5) -> str | None:
    """The known name most like a wrong one; None where none is near. The dashes of options make nothing alike.

    least: how much of both has to be alike.
    """
    known, wrong = sorted(known), wrong.lower()
    bare = {each.lstrip("-"): each for each in known}
    if ours := ALSO.get(wrong.lstrip("-").replace("-", "_")):
        for spelled in (ours, ours.replace("_", "-")):
            if spelled in bare:
                return bare[spelled]
    near = difflib.get_close_matches(wrong.lstrip("-"), bare, n=1, cutoff=least)
    return bare[near[0]] if near else None


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """End of an error sentence: the nearest known name, else all of them."""
    known = sorted(known)
    if near := nearest(wrong, known):
        return f"did you mean {near}?"
    return f"known: {', '.join(known)}" if known else "there are none"
