"""The command `sluice`. One module per command; each declares its arguments in add() and works in run().

Modules import ray, torch and the like inside run(), so that `sluice --help` answers at once.
"""
