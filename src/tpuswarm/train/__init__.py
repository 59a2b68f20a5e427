"""One member: the recipe contract and all that trains one model on the devices of one process.

`recipe.py` is the contract, `supervised.py` makes a recipe from one loss, `fit.py` chooses and compiles, `trainer.py`
is what a user asks, `loop.py` the loop; each other file is one thing the loop uses (feed, checkpoints, run directory,
outputs, report), and `diagnose/` finds what slows it.
"""
