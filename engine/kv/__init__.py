"""The KV cache. Accounting (which block holds which tokens of whom) knows no tensors and imports no torch.

`prefix` names the content of a block, `pool` counts references and remembers named blocks after their last
owner let go, `manager` is what the scheduler talks to; `storage` is apart from them: the tensors on a rank. To
account differently (a host tier, sliding windows), implement `manager.KVCache`.
"""
