"""Output of a run: live views, logs for TensorBoard and W&B, reports, pictures, profiles."""
