"""Speculative decoding. A method is one file with a class that follows Proposer and one line in base.PROPOSERS."""
