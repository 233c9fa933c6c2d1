"""What every engine is asked: closed loops of streamed, greedy completions of fixed length."""

from __future__ import annotations

from dataclasses import dataclass

from load_tests.arrivals import Closed
from load_tests.lengths import Fixed
from load_tests.scenario import Phase, Prefixes, Scenario

_CELL_S = 45.0
"""After this long no further requests are begun, so that a slow engine does not hold up the others."""
_MOST_WARM_UPS = 8


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """`prefix_tokens` are shared by all prompts and not in the server's cache at first."""

    name: str
    concurrency: int
    requests: int
    prompt_tokens: int = 256
    output_tokens: int = 64
    prefix_tokens: int = 0

    def scenario(self, round_number: int) -> Scenario:
        """The seed differs between rounds and phases' names between workloads: no prompt comes twice, and only the
        shared prefix can be found in a cache. The warm-up shares nothing with what is measured."""
        closed = Closed(kind="closed", concurrency=self.concurrency)
        own, output = (Fixed(kind="fixed", tokens=n) for n in (self.prompt_tokens, self.output_tokens))
        whole = Fixed(kind="fixed", tokens=self.prefix_tokens + self.prompt_tokens)
        shared = Prefixes(groups=1, tokens=self.prefix_tokens) if self.prefix_tokens else None
        return Scenario(
            name=self.name,
            prompt_form="text",
            seed=round_number,
            phases=[
                Phase(
                    name=f"{self.name} warm-up",
                    arrivals=closed,
                    prompt=whole,
                    output=Fixed(kind="fixed", tokens=8),
                    requests=1 if self.prefix_tokens else min(self.concurrency, _MOST_WARM_UPS),
                    measured=False,
                ),
                Phase(
                    name=self.name,
                    arrivals=closed,
                    prompt=own,
                    output=output,
                    requests=self.requests,
                    prefixes=shared,
                    duration_s=_CELL_S,
                ),
            ],
        )


_REQUESTS = {1: 5, 8: 16, 32: 64}


def main(concurrency: int) -> PeerWorkload:
    requests = _REQUESTS.get(concurrency, 2 * concurrency)
    return PeerWorkload(f"main c={concurrency}", concurrency, requests)


PREFIX = PeerWorkload("prefix", concurrency=8, requests=32, prompt_tokens=32, output_tokens=16, prefix_tokens=1024)
