"""Chooses and calls what serves a request: pools of replicas and upstreams.

Pure: table and plan (which destinations, in which order), policies (which replica of a pool), circuit, retry_budget,
hedge, continuation, backlog, prefixes. With Ray: router (the deployment that owns the table), table_feed, pool,
cold_start. dispatch takes one request through its plan; serve_backend is what the API calls.
"""
