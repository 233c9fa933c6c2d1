"""Where everything that runs in Serve's processes logs.

Serve writes to a replica's own log file what is logged to `ray.serve`; what other loggers are told only stands among
the output of the worker process, where nobody looks.
"""

from __future__ import annotations

import logging

log = logging.getLogger("ray.serve")
