"""What a gateway adds to a request: Sluicegate's beside LiteLLM's proxy.

`mock` answers at once and is what both call: LiteLLM's proxy as its backend, Sluicegate's gateway as its upstream.
The targets `sluicegate-engine` call our own engine, with the executor of `load_tests.stand_in`, whose steps take no
time. A target is a class in targets.py and a line in TARGETS.
"""
