"""Check, preview and prepare what is about to be created."""
