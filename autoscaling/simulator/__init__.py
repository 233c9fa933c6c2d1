"""Traffic against a pool of simulated replicas under the production controller. Discrete-event and seeded: the same
inputs give the same numbers on any machine.

`reference.py` is the engine model in Python, one step at a time; `engine.cpp` is the same model, operation for
operation, for speed (`native.py` builds it once; without a compiler the Python one runs). `run.py` puts the controller
on top. To change the model, change both: a test holds them equal to the last bit.
"""
