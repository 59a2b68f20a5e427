"""Check and preview new machines, and prepare projects for them."""
