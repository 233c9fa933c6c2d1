"""Who may use the product, and what each has used: organisations, projects, API keys, budgets and the ledger.

secret (how a key looks, pure), records (plain data), tenant and static_keys (no database needed), tables, database
(connections, migrations), key_store and directory (reading and changing, synchronous), key_cache (the gateway's cache
over the store, for an event loop), auth (who a request comes from). The ledger: usage_entry (one request's use),
ledger_store (in the database), ledger_spill (a file for when the database cannot be reached), ledger_writer (a thread
between the gateway and both), budget (who may still spend).

SQLite as a file, Postgres by URL. To change the schema: change tables.py, and add a module to migrations/versions that
does the same to a database with data in it.
"""
