"""Plan before renting: compile for TPUs you do not have; report what fits, how fast at best, and the price.

`compile_pool.py` runs each request in a separate process (`compile_process.py`, `fit.py`) and caches the result
(`cache.py`). `row.py` adds speed and price (`speed.py`), `swarm.py` a swarm. Only the compiling processes import JAX.
"""
