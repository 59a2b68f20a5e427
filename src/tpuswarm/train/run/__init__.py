"""The run directory: what is in it, who has it, how it stands, and how a run is read back."""
