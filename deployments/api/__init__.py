"""The OpenAI API over HTTP: ASGI endpoints over a small protocol (backend). Nothing here knows Ray.

A request's way: middleware (request id, errors, the record) -> services (who asks, body) -> request_types, options,
messages, prompts (what a client may say) -> requests (the PreparedRequest) -> rate_limiter -> generation (runs it) ->
chat or completions (the words of the answer) -> sse. To add an endpoint that generates: a function from fields to a
PreparedRequest, one that makes a body, a ChunkBuilder, and a line in endpoints.
"""
