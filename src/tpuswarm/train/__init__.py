"""One member: the recipe contract and all that trains one model on the devices of one process.

In this room is what a user asks and gives: `recipe.py` is the contract, `optional.py` what a recipe may do beside it,
`supervised.py` makes a recipe from one loss (`losses.py`, `paths.py`), `settings.py` says which settings win,
`user_code.py` finds the user's code and tells its errors from ours, `trainer.py` is the trainer. From it the rooms go
downwards, and imports with them (pyproject.toml):

- `loop/`: the steps of a run, from what was asked to its result
- `look/`: what a person sees of it
- `run/`: the run directory, and a run read back
- `diagnose/`: what makes a run slow or silently wrong; `hosts/`: one program over several hosts
- `program/`: the program compiled for its devices
- `data/`: from a source's rows to arrays on the devices
- `bucket/`: a run in a bucket
- `process/`: this process on its machine
"""
