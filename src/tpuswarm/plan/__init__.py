"""Know before you rent: compile for a TPU without one, what fits, how fast at best, at what price.

`children.py` sends each order to a process of its own (`child.py`, `judge.py`) and keeps its answer (`cache.py`);
`row.py` adds speed and price (`roofline.py`), `estimate.py` the swarm. Only the children import JAX.
"""
