"""The run directory: files, owner, status, and loading a run's parameters."""
