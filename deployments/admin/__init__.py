"""The admin API, /admin/v1: keys and accounts, usage, and which replicas take requests."""
