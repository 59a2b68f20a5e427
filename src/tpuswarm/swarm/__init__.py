"""Many members train one model; any of them may die at any moment, and nothing counts twice.

`core/` computes and decides, purely. `coordinator`, `aggregator` and `member` are the processes around it, written as
generators of `effects`, with a member's arrays in `holder`; `engines/` run them. `store`, `objects` and `ledger` keep
what must last; `replay`, `verify`, `retention` and `index` are what is made of it.
"""
