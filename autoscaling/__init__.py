"""How many replicas a pool should have: signals in, a decision with its reasons out. Knows no Ray and no clock.

    replica samples -> pool_signals() -> Signals -> policy -> Proposal -> Guardrails -> Decision

`controller.Controller` runs that line and never raises. The simulator runs the same controller against recorded or
generated traffic. To add a policy: one module in `policies/` and one line in `base.POLICIES`.

Words. *Work*: seconds one replica needs. *Utilisation*: work per second, 1 is one replica fully used. *Backlog*: work
of the prompt tokens not yet computed. *Seats*: sequences a replica runs at once (`max_num_seqs`).
"""
