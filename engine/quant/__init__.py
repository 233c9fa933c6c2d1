"""Quantization: how a linear layer's weight is stored, cut for tensor parallelism, and multiplied.

To add a format: one file here with a QuantFormat class, one case in formats.format_for, and samples for
tests/contract/test_quant_formats.py. A new GGUF block type is one entry in gguf_codecs.CODECS.
"""
