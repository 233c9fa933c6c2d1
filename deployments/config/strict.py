"""The base of all settings that a config file may hold."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen, and a key that it does not declare is an error. The text below each field is the field's description in
    docs/configuration.md."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # Serve logs what building an application raises; the input may hold keys
    )
