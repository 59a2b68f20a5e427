"""Train one model on the devices of one process, or of several hosts that run one program.

`trainer.py` trains; `recipe.py` is the contract of a recipe. `supervised.py` makes a recipe from one loss, and
`supervised_program.py` computes its steps. Packages, from the top down, as imports go:

- `loop/`: the steps of a run
- `look/`: progress, logs and reports
- `run/`: the run directory, and loading runs
- `diagnose/`: faults that make a run slow or silently wrong
- `hosts/`: one program over several hosts
- `program/`: compile the program for its devices
- `data/`: bring rows from a source to the devices
- `storage/`: a run in a bucket
- `process/`: signals, terminal and files of this process

The largest room, because half of it is not training: errors in one sentence with the user's line, several hosts, a
bucket that lies, and faults that would train silently wrong.
"""
