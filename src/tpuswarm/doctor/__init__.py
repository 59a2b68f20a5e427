"""Find problems of hosts, the fleet or a run.

`collect.py` runs on a host and prints facts; `checks.py` turns them into findings; `examine.py` brings both together.
`survey.py` collects for a report; `assumptions.py` compares it with catalog/data/assumptions.toml.
"""
