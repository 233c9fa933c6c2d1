"""python -m load_tests.fuzz: sends a running server what its own API description allows, and what it forbids.

Nothing may be answered with a 5xx other than "not now", or in a way that /openapi.json does not describe, and nothing
forbidden may be accepted. What is allowed may still be refused: the document cannot say how much fits into a model's
context. Needs the package schemathesis.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from load_tests.errors import LoadError

_SHARES = {"POST": 8, "GET": 1}  # where there is a body, there is more to get wrong
_SMALL = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}
_SHOWN = 5
_PATIENCE_S = 60.0


def _bearer(key: str) -> type[Any]:
    class Bearer:
        def get(self, case: Any, context: Any) -> str:
            return key

        def set(self, case: Any, data: str, context: Any) -> None:
            case.headers["authorization"] = f"Bearer {data}"

    return Bearer


def main(argv: Sequence[str] | None = None) -> int:
    """0: no fault. 1: faults. 2: could not begin."""
    p = argparse.ArgumentParser(prog="python -m load_tests.fuzz", description=(__doc__ or "").split("\n")[0])
    p.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    p.add_argument("--api-key", default="", help="with the scopes models.read and inference")
    p.add_argument("--cases", type=int, default=5000, help="about how many (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="other cases for another one (default: %(default)s)")
    p.add_argument("--admin", action="store_true", help="the admin API too: it will make keys and projects")
    args = p.parse_args(argv)
    try:
        return _run(args.base_url.rstrip("/"), args.api_key, args.cases, args.seed, args.admin)
    except LoadError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2


def _run(base: str, key: str, cases: int, seed: int, admin: bool) -> int:
    try:
        import schemathesis
        from schemathesis.core.result import Ok
    except ImportError:
        raise LoadError("needs schemathesis: pip install 'schemathesis>=4'") from None
    try:
        api = schemathesis.openapi.from_url(f"{base}/openapi.json")
    except Exception as error:
        raise LoadError(f"{base}/openapi.json: {error}") from None
    api.config.generation.with_security_parameters = False  # bodies are what there is most to say about
    if key:
        api.auth()(_bearer(key))
    operations = [found.ok() for found in api.get_all_operations() if isinstance(found, Ok)]
    chosen = [operation for operation in operations if admin or not operation.path.startswith("/admin/")]
    shares = sum(_SHARES.get(o.method.upper(), 1) for o in chosen)
    models = _models(base, key)
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    began = time.monotonic()
    for operation in chosen:
        share = max(1, cases * _SHARES.get(operation.method.upper(), 1) // shares)
        before = sum(statuses.values())
        found = _try(operation, share, seed, models, statuses)
        faults += found
        sent = sum(statuses.values()) - before
        print(f"{operation.method.upper():6} {operation.path}: {sent} cases, {len(found) or 'no'} faults", flush=True)
    shown = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    print(f"{sum(statuses.values())} cases in {time.monotonic() - began:.0f} s; {shown}; {len(faults)} faults")
    for fault in faults[:_SHOWN]:
        print(f"\n{fault}")
    return 1 if faults else 0


def _try(operation: Any, cases: int, seed: int, models: list[str], statuses: Counter[int]) -> list[str]:
    """What was wrong with the operation: the first fault ends its cases."""
    import hypothesis
    from hypothesis import strategies as st
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS

    kinds = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]
    excluded = [CHECKS.get_one("positive_data_acceptance"), CHECKS.get_one("not_a_server_error")]

    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.seed(seed)
    @hypothesis.given(case=st.one_of(kinds), known=st.sampled_from([*models, None]))
    def check(case: Any, known: str | None) -> None:
        if isinstance(case.body, dict):
            _ease(case.body, known)
            if operation.path.endswith("/completions") and case.body.get("max_tokens") is None:
                case.body["max_tokens"] = 4  # the default of a chat is all that its context leaves
        response = case.call(timeout=_PATIENCE_S)
        statuses[response.status_code] += 1
        if response.status_code >= 500 and "retry-after" not in response.headers:
            raise AssertionError(f"{response.status_code}: {response.text[:300]}")
        case.validate_response(response, excluded_checks=excluded)

    try:
        check()
    except BaseExceptionGroup as group:
        return [str(error)[:2000] for error in group.exceptions]
    except AssertionError as error:
        return [str(error)[:2000]]
    return []


def _ease(body: dict[str, Any], model: str | None) -> None:
    """A model that exists, and answers that do not take long, where the body is not about something else."""
    if model is not None and isinstance(body.get("model"), str):
        body["model"] = model
    for name, most in _SMALL.items():
        if type(value := body.get(name)) is int and value > most:
            body[name] = most


def _models(base: str, key: str) -> list[str]:
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx.get(f"{base}/v1/models", headers=headers, timeout=30.0, trust_env=False)
    if answer.status_code != 200:
        raise LoadError(f"{base}/v1/models: http {answer.status_code} {answer.text[:200]}")
    return [model["id"] for model in answer.json()["data"]]


if __name__ == "__main__":
    sys.exit(main())
