"""Settings that may stand in the environment instead of the config file, such as keys and URLs with passwords."""

from __future__ import annotations

import os


def from_environment(setting: str, whose: str) -> str:
    """The setting itself or, if it is `env:NAME`, the value of that variable. `whose` begins the message of the
    ValueError that is raised when the variable is not set, for example "the database's"."""
    if not setting.startswith("env:"):
        return setting
    name = setting.removeprefix("env:")
    if not (value := os.environ.get(name, "").strip()):
        raise ValueError(f"{whose} environment variable {name!r} is not set")
    return value
