"""The inference engine: a library without Ray, HTTP or pydantic.

Vocabulary: a *sequence* is one choice of one request; a *step* runs some pending tokens of some sequences;
a *block* holds K/V of `block_size` tokens; a *slot* is one token's place in a block; a *rank* is one
tensor-parallel worker; a *draft* is an unverified token.
"""
