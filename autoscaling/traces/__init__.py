"""Traffic to simulate: `formats.py` reads recorded files, `generators.py` makes some, `trace.py` is what both become.
To add a generator: one function and one line in `generators.GENERATORS`."""
