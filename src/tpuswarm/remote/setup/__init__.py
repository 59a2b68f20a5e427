"""Sets machines up: steps as data, each with what it does, how it is seen to hold, and a stamp of what was done."""
