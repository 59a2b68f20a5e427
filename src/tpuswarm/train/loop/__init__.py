"""The loop over the steps of a run, from what was asked to its result."""
