"""Organisations, projects and API keys in an SQL database: SQLite as a file, Postgres by URL.

secret (what a key looks like, pure), records (the nouns), tables, database (connections, migrations), store and
directory (reading and changing, synchronous), ring (the gateway's cache over the store, for an event loop). Nothing
here knows HTTP. To change the schema: change tables.py, and add a module to migrations/versions that does the same to
a database with data in it.
"""
