"""Know before you rent: compile for a TPU without one, what fits, how fast at best, at what price."""
