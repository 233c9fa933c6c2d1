"""Is the scaling simulator true? The real graph (gateway, router, replicas, signals, policy, Serve's controller)
plays a trace with engines that take their time from a service model and hardly any CPU, and the simulator predicts it.
"""
