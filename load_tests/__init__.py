"""Measures OpenAI-compatible servers under load, and the engine alone.

A scenario (YAML) says who asks what and when; workload turns it into requests, prompts writes their text, runner
sends them when they are due through client, stats makes numbers of the outcomes, report shows them. `bench` is the
same for one phase given on the command line of `sluice bench`. engine_bench measures the engine without HTTP,
graph_cost HTTP and the graph without an engine.

To add an arrival process or a length distribution: a class in arrivals or lengths, and its name in the union there.
To add a trace format: a reader in autoscaling.traces.formats.
"""
