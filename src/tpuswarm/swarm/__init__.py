"""Many members train one model; any of them may die at any moment, and nothing counts twice.

The path of a contribution, from the member that made it to the person who looks at it:

1. `member/` trains on leased rows and pushes (`cycle`); its arrays are in `holder`, on one host or on several (`lead`).
2. `processes/` take it in: an aggregator its payload, the coordinator its header, which accepts it. Their decisions are
   those of `core/` (`books` of a member, `state` of the coordinator, `rounds`, `choose`), their sums those of
   `core/arithmetic/` (`merge`, `outer`).
3. `storage/` keeps it: `objects` the arrays, `ledger` the record that counts it, and now and then a `bookmark` from
   which the ledger is read on; `replay` and `verify` prove it, `retention` ends it.
4. `member/` takes the commit over (`core/arithmetic/adopt`), between two steps.
5. `views/` show it.

`engines/` carry what the processes ask of each other. `supervision/` goes from `train --members` to a run of them, and
keeps them alive; `simulation/` is a swarm without its machines.

Words: a member's *push* carries one *contribution*; a *commit* merges contributions into the model and is one record of
the ledger. `version` is the number of a commit, in code and in files.
"""
