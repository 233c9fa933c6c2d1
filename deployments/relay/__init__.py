"""From Serve's proxy to a gateway without Serve's calls, which cost more than all that the gateway does.

`client` lives in the proxy, below proxy_guard; `server` is the outermost layer of the gateway's ASGI app. The proxy
asks a gateway for a lease by an ordinary request through Serve, which the gateway holds open while the lease lasts and
while anything runs that came under it. So Serve chooses the gateways, sees that proxy and gateway are busy, and drains
both as ever: a gateway that it takes out gets no new lease. With a lease goes an address and a secret, and requests
then travel as messages on one connection (see channel.frames and channel.proven). Whatever cannot go this way goes
through Serve: large bodies, other paths, and the first request. Serve's own counts of HTTP requests do not see what is
relayed; the gateway's metrics do.
"""
