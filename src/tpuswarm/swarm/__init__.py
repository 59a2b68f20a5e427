"""Train one model with many members; any process may die at any moment, and no work counts twice.

The path of a contribution:

1. `member/` trains on leased rows and pushes (`loop`). Its arrays are in `program_state`, on one host or several
   (`leader`).
2. `processes/` receive it: an aggregator its payload, the coordinator its header, which accepts it. They apply the
   rules of `core/` (`member_state`, `transitions`, `rounds`, `choose`) and its arithmetic (`merge`, `outer`).
3. `storage/` keeps it: `objects` the arrays, `ledger` the record that counts it, `bookmark` a shortcut for readers.
   `replay` and `verify` prove it, `retention` deletes old arrays.
4. `member/` adopts the commit between two steps (`core/arithmetic/adopt`).
5. `views/` show it.

`engines/` carry calls between the processes. `supervision/` starts a run from `train --members` and keeps it alive.
`simulation/` runs a swarm without its machines.

Its size comes from processes that may die at each step: each step has a decision, its arithmetic, its record and its
proof.

A member's *push* carries one *contribution*. A *commit* merges contributions into the model and is one record of the
ledger; `version` is its number.
"""
