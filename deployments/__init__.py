"""The Serve graph of the product, its settings and the command `sluice`."""
