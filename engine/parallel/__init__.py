"""Tensor parallelism: the group of ranks that share one model, and a rank's slice of a stored tensor.

Layers take a TPGroup as an argument and quantization formats never hear of ranks: a format describes its
tensors with ParamSpec, and sharding.features() cuts them. To add a way to communicate: one class with
TPGroup's methods.
"""
