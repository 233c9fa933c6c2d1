"""Rate limits: how many requests and tokens a minute, and how many requests at once.

`base` has the nouns, `window` and `book` the arithmetic (pure; the clock is an argument), `levels` says which limits a
request falls under. A store keeps the counts: `memory` in this process, `actor` in one process shared by all gateways,
which lease amounts from it, `redis` in a Redis server. `outage` decides what happens while the store cannot be reached.

A new store is one module with a class that does what `base.Store` says, one name in `config.limits.STORES` and one
branch in `build`; the contract tests run over every entry of the table.
"""
