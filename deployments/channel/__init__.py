"""The connection between a gateway and a replica: one TCP connection each, on which all their streams travel.

Serve places, watches and restarts replicas, and says which there are; requests and tokens do not pass through it,
because it takes much CPU time for each call and each message. `codec` turns the engine's frozen types into plain tuples
and back, `frames` cuts a byte stream into messages, `messages` says which there are, `handshake` proves who speaks,
`server` is the replica's end and `client` the gateway's. A message of a new kind is one constant in `messages` and one
case at the end that gets it.

Nothing on the wire is executable, and nobody without a replica's secret is listened to; but frames are neither
encrypted nor signed, like Serve's own traffic inside the cluster.
"""
