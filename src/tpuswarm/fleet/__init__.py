"""Keeps the machines of swarm.toml.

`file.py` and `checks.py` are the file, `core/` decides (pure: what exists and what is wanted give what to do next, with
reasons), `store.py` holds what is wanted where any laptop finds it, `keeper.py` looks, decides and acts.
"""
