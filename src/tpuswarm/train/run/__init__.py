"""The run directory: files, checkpoints, owner, status, and loading a run's parameters.

A kill, a full disk or an editor may have damaged any file, so all readers validate.
"""
