"""The engine alone, without HTTP: `python -m load_tests.engine_bench`.

Each part is a module with run(bench) -> tables, and its line in PARTS of __main__: throughput (beside transformers),
decode (step time against what memory and the linear layers allow), prefill, overhead (what is not the model, and where
a decode step goes), scheduling (streams beside a long prompt, swapping, tiers under overload), contention (another
process on one of our cores), kv_quality (what narrow K/V caches cost). They share one loaded model, the Subject; what
is measured inside a step is measured by timers around the layers' calls, put there and taken away by breakdown, so
that the engine itself has none. On the CPU only.
"""
