"""What is wrong with machines, why it matters and how to mend it: facts from each host in one round trip, then checks.

`collect.py` runs on the host; each file of `checks/` judges what it has found; `examine.py` brings both together.
"""
