"""The KV cache. Accounting (which block holds which tokens of whom) knows no tensors and imports no torch.

`prefix` names the content of a block, `pool` counts references and remembers named blocks after their last
owner let go, `window` says what no later token sees, `manager` is what the scheduler talks to; `storage` is apart from
them: the tensors on a rank, and `scales` what a narrow one may be given. To account differently, implement
`base.KVCache`.
"""
