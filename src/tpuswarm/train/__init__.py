"""Train one model on the devices of one process, or of several hosts that run one program.

`trainer.py` is the trainer and `recipe.py` the contract of what it trains; `optional.py` lists what a recipe may add.
`supervised.py` makes a recipe from one loss, `supervised_program.py` its step. `settings.py` resolves settings, and
`user_code.py` finds the user's code and tells its errors from ours. Packages, from the top down, as imports go:

- `loop/`: the steps of a run
- `look/`: what a person sees of it
- `run/`: the run directory, and runs read back
- `diagnose/`: find what makes a run slow or silently wrong
- `hosts/`: one program over several hosts
- `program/`: compile the program for its devices
- `data/`: bring rows from a source to the devices
- `storage/`: a run in a bucket
- `process/`: this process on its machine
"""
