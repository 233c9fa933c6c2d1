"""Traffic against a pool of simulated replicas under the production controller. Discrete-event and seeded: the same
inputs give the same numbers on any machine.

`replicas.cpp` models the replicas, exact to their steps; `cluster.py` compiles it once and calls it; `run.py` puts the
controller on top. To change the model, change `tests/helpers_replicas.py` too, which is the same model in plain Python,
operation for operation: a test holds the two equal to the last bit.
"""
