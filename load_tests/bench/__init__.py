"""A load generator for any OpenAI-compatible endpoint: `sluice bench`.

workload: who asks what and when, from a seed. client: one streamed completion, timed. stats: percentiles, pure.
bench: runs a workload and reports.
"""
