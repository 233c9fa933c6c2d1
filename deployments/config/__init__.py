"""Settings: what may stand in a Serve config file, as types, and what finds everything that is wrong with one.

application is the root of what stands under `args:`. The other modules of settings are its parts. serve_file reads a
whole file; problems words what is wrong; check_routing and check_tls look at what no single type can know.
"""
