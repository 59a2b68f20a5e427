"""Run the steps of a run: from its settings to its result."""
