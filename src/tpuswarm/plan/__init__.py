"""Plan before renting: compile for TPUs you do not have; report what fits, how fast at best, and the price.

`compile/` runs each request in a separate process and caches the result. `row.py` adds speed and price (`speed.py`),
`swarm.py` a swarm. Only the compiling processes import JAX.
"""
