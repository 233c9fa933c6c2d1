"""The parts of a decoder layer, inference only: plain objects that hold tensors and are called.

What varies from step to step (batch, cache, attention plans) comes down in a ForwardContext; what varies by
machine comes in through QuantFormat, Kernels, AttentionBackend and TPGroup. A model is a file in
engine/models that puts these parts together.
"""
