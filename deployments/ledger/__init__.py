"""What requests used, kept for good: by organisation, project, key and model, with a budget per project.

entry (one request's use), store (the database's side), spill (a file for when the database is away), writer (a thread
between the gateway and both), budget (who may still spend).
"""
