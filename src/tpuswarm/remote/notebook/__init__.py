"""Run Jupyter on a machine over SSH; on a slice, one kernel whose cells all workers repeat."""
