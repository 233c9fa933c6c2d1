"""The OpenAI API over HTTP. Everything but deployment.py and serve_backend.py is free of Ray: an ASGI app (app) over
a small protocol (backend).

A request's way: edge (ids, headers, errors, the record) -> auth -> body (bounds, JSON) -> protocol, options, messages,
prompts (what a client may say) -> requests (the Job) -> generation (runs it) -> chat or completions (the words of the
answer) -> sse. Where there is a key database, accounts has what stands on it, and admin its HTTP API. To add an
endpoint that generates: a function from fields to a Job, a Form, and a route in app.
"""
