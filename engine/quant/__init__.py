"""Quantization: how a linear layer's weight is stored, cut for tensor parallelism, and multiplied.

To add a format: one file here with a QuantFormat class, one line in base.FORMATS, and (if checkpoints store it
under a new name) one case in base.format_for. tests/contract/test_quant_formats.py picks it up by name.
A new GGUF block type is one entry in gguf_codecs.CODECS.
"""
