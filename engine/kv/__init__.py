"""KV-cache accounting: which block holds which tokens of whom. No tensors, no torch.

`prefix` names the content of a block, `pool` counts references and remembers named blocks after their last
owner let go, `manager` is what the scheduler talks to. To account differently (a host tier, sliding
windows), implement `manager.KVCache`.
"""
