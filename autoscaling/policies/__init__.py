"""The policies, one a file. Each says how many replicas would be right now; bounds, speed limits and damping are the
guardrails'. To add one: a module with a class as `base.ScalingPolicy` says, and one line in `base.POLICIES`."""
