"""python -m load_tests.limits_check: many clients on one key, to see whether its tokens per minute are kept and given.

Each client asks again as soon as it has an answer, or when the server said after a refusal, a little spread out. For
`--minutes` minutes all tokens of all answers are noted. The server may count a request at any time between its sending
and its answer, so a minute is only known to hold the requests that were sent and answered within it. Exit status 1 when
some minute held more than the limit, or less than 95 % of all that was to be had was given.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

_MINUTE_S = 60.0
_SPREAD_S = 3.0
_WANTED = 0.95


@dataclass(frozen=True, slots=True)
class Answered:
    """Times in seconds from the start."""

    sent_s: float
    answered_s: float
    tokens: int


@dataclass(slots=True)
class Seen:
    limit: int = 0
    answered: list[Answered] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)


def most_in_a_minute(answered: Sequence[Answered]) -> int:
    """Of the requests sent and answered within some 60 seconds."""
    return max(
        (
            sum(a.tokens for a in answered if first.sent_s <= a.sent_s and a.answered_s <= first.sent_s + _MINUTE_S)
            for first in answered
        ),
        default=0,
    )


def share_used(answered: Sequence[Answered], limit: int, minutes: int) -> float:
    """Of the tokens that `minutes` whole minutes had to give. A minute and its slices of 0.1 s take 60.1 s."""
    return sum(a.tokens for a in answered if a.sent_s < minutes * (_MINUTE_S + 0.1)) / (limit * minutes)


async def check(base_url: str, key: str, model: str, clients: int, minutes: int, seed: int) -> Seen:
    seen, begin_s = Seen(), time.monotonic()
    end_s = minutes * (_MINUTE_S + 0.1)

    async def one_client(http: httpx.AsyncClient, draw: random.Random) -> None:
        while (sent_s := time.monotonic() - begin_s) < end_s:
            body = {"model": model, "prompt": "Count: 1, 2, 3,", "max_tokens": draw.randint(1, 24), "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            seen.statuses[answer.status_code] += 1
            seen.limit = int(answer.headers.get("x-ratelimit-limit-tokens", seen.limit))
            if answer.status_code == 200:
                tokens = answer.json()["usage"]["total_tokens"]
                seen.answered.append(Answered(sent_s, time.monotonic() - begin_s, tokens))
            else:
                await asyncio.sleep(float(answer.headers.get("retry-after-ms", 1000)) / 1000)
                await asyncio.sleep(draw.uniform(0, _SPREAD_S))

    headers = {"authorization": f"Bearer {key}"}
    bounds = httpx.Limits(max_connections=clients)
    async with (
        httpx.AsyncClient(base_url=base_url, headers=headers, timeout=120, limits=bounds) as http,
        asyncio.TaskGroup() as group,
    ):
        for i in range(clients):
            group.create_task(one_client(http, random.Random(seed * 1000 + i)))
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m load_tests.limits_check", description=(__doc__ or "").split("\n\n")[1])
    p.add_argument("--base-url", default="http://127.0.0.1:8000")
    p.add_argument("--key", required=True, help="one whose tier has tokens per minute")
    p.add_argument("--model", default="smollm2-135m-instruct")
    p.add_argument("--clients", type=int, default=200)
    p.add_argument("--minutes", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    seen = asyncio.run(check(args.base_url, args.key, args.model, args.clients, args.minutes, args.seed))
    if not seen.limit:
        print(f"no x-ratelimit-limit-tokens in the answers; statuses {dict(seen.statuses)}")
        return 1
    most, share = most_in_a_minute(seen.answered), share_used(seen.answered, seen.limit, args.minutes)
    print(f"limit {seen.limit} tokens per minute; {args.clients} clients; statuses {dict(seen.statuses)}")
    print(f"most in any minute {most}; used {share:.1%} of {args.minutes} minutes")
    return 0 if most <= seen.limit and share >= _WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
