"""Our server beside others, on the same model, machine and minute: `python -m load_tests.peers`.

Each engine is a Peer: how it is installed under the cache directory, and how its server is started. compare starts
one server at a time, in rounds (A B C, A B C, ...), sees that it answers a known prompt right, and measures every
workload with the load generator of this package; store keeps each measurement as it comes, report makes medians and
ratios of them. To add an engine: a file with its class, and its line in PEERS.
"""
