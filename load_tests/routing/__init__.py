"""What a routing policy is worth: the product's own policy objects over simulated replicas.

`python -m load_tests.routing` prints, for each workload, a table of the policies: how much of the prompts the prefix
caches had, how evenly the replicas were loaded, and the time to the first token; at the end, what a decision costs.
"""
