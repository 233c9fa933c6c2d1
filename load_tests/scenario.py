"""A load test as a YAML file: strict and typed. Every key is described here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from deployments.config.problems import unknown_keys, without, wrong_values
from deployments.config.yaml_file import YamlFileError, read_yaml
from load_tests.arrivals import Arrivals, Closed, Ramp, RecordedArrivals
from load_tests.errors import LoadError
from load_tests.lengths import Length, RecordedLength
from load_tests.spec import Count, NotNegative, Positive, Spec

SHIPPED = Path(__file__).parent / "scenarios"


class Prefixes(Spec):
    """Each prompt begins with `tokens` tokens that it shares with the other prompts of its group; the group is drawn
    at random. `tokens` come on top of the phase's `prompt`."""

    groups: Count
    tokens: Count


class Conversations(Spec):
    """Each arrival is a conversation of `turns` requests: every one repeats all that was said before and adds
    `prompt` tokens. A turn is due a pause after the last answer, exponential with the mean `think_s`. After an error
    the rest of a conversation is not sent."""

    turns: Length
    think_s: NotNegative = 0.0


class TraceFile(Spec):
    """A recorded trace: `file` (relative to the scenario's), played `time_scale` times as long (0.1: ten times as
    fast), from `start_s` seconds (of the recording) on."""

    file: Path = Field(strict=False)
    time_scale: Positive = 1.0
    start_s: NotNegative = 0.0


class Phase(Spec):
    """A part of the test with one kind of load. Phases follow each other without waiting for answers, unless
    `drain`. `requests` counts arrivals (conversations, where there are any); with `duration_s` too, whichever comes
    first. Answers of a phase that is not `measured` (a warm-up) stay out of the totals."""

    name: str
    arrivals: Arrivals
    prompt: Length
    output: Length
    requests: Count | None = None
    duration_s: Positive | None = None
    prefixes: Prefixes | None = None
    conversations: Conversations | None = None
    trace: TraceFile | None = None
    drain: bool = False
    measured: bool = True

    @model_validator(mode="after")
    def _complete(self) -> Phase:
        recorded = isinstance(self.arrivals, RecordedArrivals)
        if self.requests is None and self.duration_s is None and not recorded:
            raise ValueError("needs requests or duration_s")
        if isinstance(self.arrivals, Ramp) and self.duration_s is None:
            raise ValueError("a ramp needs duration_s")
        used = recorded or any(isinstance(length, RecordedLength) for length in (self.prompt, self.output))
        if used and self.trace is None:
            raise ValueError("kind: trace needs the phase's trace")
        if self.trace is not None and not used:
            raise ValueError("nothing uses the trace: give arrivals, prompt or output kind: trace")
        if self.conversations is not None and isinstance(self.conversations.turns, RecordedLength):
            raise ValueError("turns are not recorded in traces")
        return self

    @property
    def is_open(self) -> bool:
        return not isinstance(self.arrivals, Closed)


class Slo(Spec):
    """What a request must keep to count as good: time to first token, and its mean time per further token."""

    ttft_ms: Positive | None = None
    itl_ms: Positive | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Slo:
        if self.ttft_ms is None and self.itl_ms is None:
            raise ValueError("needs ttft_ms or itl_ms")
        return self


class Scenario(Spec):
    """`prompt_form`: ids sends token ids, so that prompts have exactly the length asked for (completions only); text
    sends words, in the number that gave the right count in a probe; auto takes ids where the endpoint accepts them.
    `body` is added to every request as it stands. With `ignore_eos`, outputs have exactly the length asked for (an
    extension; left out where a server refuses it)."""

    name: str
    endpoint: Literal["completions", "chat"] = "completions"
    prompt_form: Literal["auto", "ids", "text"] = "auto"
    ignore_eos: bool = True
    seed: int = 0
    timeout_s: Positive = 600.0
    slo: Slo | None = None
    body: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    phases: list[Phase] = Field(min_length=1)

    @field_validator("phases")
    @classmethod
    def _distinct(cls, phases: list[Phase]) -> list[Phase]:
        names = [phase.name for phase in phases]
        if len(set(names)) < len(names):
            raise ValueError(f"phases need distinct names, got {', '.join(names)}")
        return phases

    @model_validator(mode="after")
    def _ids_fit(self) -> Scenario:
        if self.prompt_form == "ids" and self.needs_text:
            raise ValueError("prompt_form: ids is for single completions, not for chat or conversations")
        return self

    @property
    def needs_text(self) -> bool:
        return self.endpoint == "chat" or any(phase.conversations for phase in self.phases)


def find(name: str) -> Path:
    """A path as it is; a bare name means a scenario that comes with the package. Raises LoadError."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name)
    shipped = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    if name not in shipped:
        raise LoadError(f"no scenario {name!r}; there are {', '.join(shipped)}, or give a path")
    return SHIPPED / f"{name}.yaml"


def load(path: Path) -> Scenario:
    """Raises LoadError with a line for every mistake."""
    try:
        raw = read_yaml(path)
    except YamlFileError as error:
        raise LoadError(str(error)) from None
    problems = list(unknown_keys(raw, Scenario))
    try:
        scenario = Scenario.model_validate(without(raw, {problem.path for problem in problems}))
    except ValidationError as error:
        problems += wrong_values(error)
    if problems:
        raise LoadError("\n".join(f"{path}: {problem}" for problem in problems))
    return scenario.model_copy(update={"phases": [_anchored(phase, path.parent) for phase in scenario.phases]})


def _anchored(phase: Phase, folder: Path) -> Phase:
    if phase.trace is None:
        return phase
    return phase.model_copy(update={"trace": phase.trace.model_copy(update={"file": folder / phase.trace.file})})
