"""Who runs next: pure, without torch, clock or I/O.

`queue` is the seam for the order of waiting sequences (to add a policy: one file here and one line in
`queue.QUEUES`); `scheduler` turns queue, running set and KV room into a StepPlan, and a StepResult into
tokens and endings.
"""
