"""Many members train one model; any of them may die at any moment, and nothing counts twice.

`core/` computes and decides, purely. `coordinator`, `aggregator` and `member` are the processes around it, written as
generators of `effects`, with a member's arrays in `holder`; `engines/` run them. `store`, `objects` and `ledger` keep
what must last; `replay`, `verify`, `retention` and `index` build on it.

Words: a member's *push* carries one *contribution*; a *commit* merges contributions into the model and is one record of
the ledger. `version` is the number of a commit, in code and in files.
"""
