"""Which sequences run in the next step, and with how many tokens. Without torch, clock or I/O.

`scheduler` makes a StepPlan from the waiting and the running sequences, and takes in its StepResult. Its parts: `queue`
(order of the waiting ones: `fcfs`, `priority`, both over `class_queues`), `waiting_limits` and `deadlines` (what is
refused), `admitter` (from waiting to running), `running` (and preemption), `chunk_planner` (how many tokens each prompt
gets) with `prefill_throttle` (so that decodes stay quick), `cost` (what steps take, learnt) and `arrivals`. To add an
order: one file here and one line in `queue.QUEUES`.
"""
