"""What Serve's proxy and the gateway tell each other beside what ASGI says: keys of scopes and messages, which no
client can set. Everywhere else they mean nothing."""

from __future__ import annotations

BODY = "sluicegate.body"
"""Of a scope: the whole body of a small request, which then need not be fetched from the proxy."""
CANCELS = "sluicegate.cancels"
"""Of a scope: when the client leaves, the request's task is cancelled, and there is no need to watch for it."""
HOLDER = "sluicegate.holder"
"""Of a scope: the proxy that asks for a lease, see relay."""
LEASE = "sluicegate.lease"
"""Of http.response.start: the lease."""
SEND_TIMEOUT = "sluicegate.send_timeout_s"
"""Of http.response.start: for how long the client may take nothing of this answer."""
