from __future__ import annotations

from pathlib import Path

import pytest

from load_tests.errors import LoadError
from load_tests.scenario import SHIPPED, find, load
from load_tests.workload import jobs, rows_of

PHASE = """
  - name: a
    arrivals: {kind: poisson, rate: 2}
    prompt: {kind: fixed, tokens: 8}
    output: {kind: fixed, tokens: 8}
    requests: 4
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "s.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_scenarios_can_be_run(path: Path) -> None:
    scenario = load(path)
    assert scenario.name == path.stem
    assert find(path.stem) == path
    for phase in scenario.phases:
        assert next(jobs(phase, scenario.seed, rows_of(phase)))


def test_defaults(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, f"name: x\nphases:{PHASE}"))
    assert scenario.body == {"temperature": 0} and scenario.prompt_form == "auto" and scenario.slo is None
    assert scenario.phases[0].measured and not scenario.phases[0].drain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nphases: []", "phases: .*at least 1"),
        (f"name: x\nsede: 1\nphases:{PHASE}", "sede: unknown key; did you mean seed?"),
        (f"name: x\nphases:{PHASE}    think: 1", r"phases\[0\].think: unknown key; known: arrivals, "),
        (
            f"name: x\nphases:{PHASE.replace('rate: 2', 'rte: 2')}",
            r"phases\[0\].arrivals.rte: unknown key; did you mean rate\?",
        ),
        (f"phases:{PHASE}", "name: is missing"),
        (f"name: x\nseed: '1'\nphases:{PHASE}", "seed: .*integer, got '1'"),
        (f"name: x\nphases:{PHASE.replace('rate: 2', 'rate: 0')}", "rate: .*greater than 0, got 0"),
        (f"name: x\nphases:{PHASE.replace('rate: 2', 'rate: .inf')}", "rate: .*finite"),
        (f"name: x\nphases:{PHASE.replace('poisson', 'possion')}", r"phases\[0\].arrivals: .*'poisson'"),
        (
            f"name: x\nphases:{PHASE.replace('requests: 4', 'drain: true')}",
            r"\[0\]: needs requests or duration_s",
        ),
        (
            f"name: x\nphases:{PHASE.replace('poisson, rate: 2', 'ramp, from_rate: 1, to_rate: 2')}",
            "ramp needs duration",
        ),
        (f"name: x\nphases:{PHASE.replace('fixed, tokens: 8', 'trace')}", "needs the phase's trace"),
        (f"name: x\nphases:{PHASE}    trace: {{file: t.csv}}", "nothing uses the trace"),
        (f"name: x\nphases:{PHASE.replace('fixed, tokens: 8', 'uniform, min: 9, max: 8')}", "min: 9 is above max 8"),
        (f"name: x\nphases:{PHASE}{PHASE}", "phases: phases need distinct names, got a, a"),
        (f"name: x\nendpoint: chat\nprompt_form: ids\nphases:{PHASE}", "prompt_form: ids is for single completions"),
        (f"name: x\nslo: {{}}\nphases:{PHASE}", "slo: needs ttft_ms or itl_ms"),
        (f"name: x\nname: y\nphases:{PHASE}", r"s\.yaml:2:1: key name is given twice"),
        ("a: [", r"s\.yaml:1:5: .*'<stream end>'"),
        ("- 1", r"must be a mapping, got \[1\]"),
        ("", "must be a mapping, got None"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        load(write(tmp_path, text))


def test_every_mistake_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(LoadError) as error:
        load(write(tmp_path, f"name: 1\nsede: 2\nphases:{PHASE}"))
    assert len(str(error.value).splitlines()) == 2


def test_a_traces_path_is_relative_to_the_scenario(tmp_path: Path) -> None:
    text = f"name: x\nphases:{PHASE.replace('poisson, rate: 2', 'trace')}    trace: {{file: sub/t.csv}}"
    trace = load(write(tmp_path, text)).phases[0].trace
    assert trace is not None and trace.file == tmp_path / "sub" / "t.csv"


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(LoadError, match=r"no scenario 'chit'; there are burst, chat"):
        find("chit")
    with pytest.raises(LoadError, match="No such file"):
        load(find("absent.yaml"))
