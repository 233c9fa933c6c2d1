"""Rate limits: how many requests and tokens a minute, and how many requests at once.

`base` has the types, `window` and `counters` the arithmetic (pure: the time is an argument), and `applicable` says
which limits a request falls under. A store keeps the counts: `memory` in this process, `actor` in one process that all
gateways share (`shared_counters`) and from which they lease amounts (`leased`), `redis` in a Redis server. `outage`
decides what happens while the store cannot be reached.

A new store is one module with a class that does what `base.LimitStore` says, one line in `config.limits.STORES`;
the contract tests run over every name.
"""
