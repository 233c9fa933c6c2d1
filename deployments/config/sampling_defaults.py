"""What a model samples with where a request does not say: the sampling settings of its generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.config.application import ModelConfig
from deployments.config.problems import wrong_values
from engine.errors import ModelFileError
from engine.models.locate import resolve

_FILE = "generation_config.json"


class SamplingDefaults(BaseModel):
    """Without arguments: OpenAI's defaults. Other settings of the file (`do_sample`, `max_new_tokens`, ...) are not for
    sampling, or clients expect other defaults of them: they are passed over, as vLLM does."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0

    @property
    def changed(self) -> dict[str, float]:
        """Those that are not OpenAI's."""
        return self.model_dump(exclude_defaults=True)


OPENAI_DEFAULTS = SamplingDefaults()


def sampling_defaults(config: ModelConfig) -> SamplingDefaults:
    """Those of the model's directory, unless the config says `generation_config: none`. A GGUF file has none. Raises
    ModelFileError that names the file and the field at fault."""
    place = resolve(config.engine.model)
    if config.generation_config == "none" or not place.is_dir() or not (file := place / _FILE).exists():
        return OPENAI_DEFAULTS
    return _read(file)


def _read(file: Path) -> SamplingDefaults:
    try:
        given: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{file}: {error}") from None
    if not isinstance(given, dict):
        raise ModelFileError(f"{file}: must hold a JSON object")
    try:
        return SamplingDefaults.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ModelFileError(f"{file}: {next(wrong_values(error))}") from None
