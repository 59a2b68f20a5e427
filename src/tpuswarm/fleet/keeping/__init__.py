"""Keeps a fleet as it is wanted: the document that says how, the lease on it, and the loop that looks and acts."""
