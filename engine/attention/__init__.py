"""Paged attention. A backend is one file with a class that follows base.AttentionBackend and one line in
base.BACKENDS; tests/contract/test_attention_backends.py then holds it to a dense float64 oracle."""
