"""Plan before renting: compile for TPUs you do not have; report what fits, how fast at best, and the price.

`compile_pool.py` sends each request to a process of its own (`compile_process.py`, `fit.py`) and caches the result
(`cache.py`). `row.py` adds speed and price (`speed.py`), `swarm.py` a swarm. Only the compiling processes import JAX.
"""
