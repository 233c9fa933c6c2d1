"""The whole engine on the real model: known answers whatever the batch, budget, pool, cache and neighbours."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor.base import Capacity
from engine.executor.local import LocalExecutor
from engine.text import TextModel, load_text
from engine.types import GenerateRequest, SamplingParams, StepPlan, StepResult
from tests.helpers_models import demo_gguf, make_hf_dir

pytestmark = pytest.mark.slow

OWL = "\U0001f989"
FOX = "The quick brown fox jumps over the lazy dog. "
# prompt, tokens, text: greedy, transformers in float32 on the dequantized weights
FIXTURES = {
    "COUNT": ("Count: 1, 2, 3, 4,", 24, " 5, 6, 7, 8, 9, 10, 11, "),
    "COUNT20": ("Count: 20, 21, 22,", 10, " 23, 24, 2"),
    "COUNT50": ("Count: 50, 51, 52,", 10, " 53, 54, 5"),
    "COUNTDN": ("Count down: 9, 8, 7,", 10, " 6, 5, 4, "),
    "EMOJI": ("Repeat these emoji forever: " + OWL * 8, 24, OWL * 8),
    "FOX24": (FOX * 2 + "The quick brown fox", 5, " is a classic example of"),
    "FOX32": (FOX * 3 + "The end", 3, ".\n\n"),
}
CHATHI_IDS = ([1, 9690], [520, 9531, 198])


class Borrowed:
    """A loaded executor lent to many engines in turn, as if its pool had `num_blocks`."""

    def __init__(self, inner: LocalExecutor, capacity: Capacity, num_blocks: int) -> None:
        self._inner = inner
        self._capacity = replace(capacity, num_blocks=num_blocks)

    def start(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._inner.submit(plan)

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        return


class Demo:
    def __init__(self) -> None:
        self.path = str(demo_gguf())
        self._executor = LocalExecutor(EngineConfig(model=self.path, num_kv_blocks=1024, num_threads=2))
        self._capacity = self._executor.start()
        self.text: TextModel = load_text(self.path)

    def engine(self, num_blocks: int = 1024, **settings: object) -> Engine:
        # A slowdown without limit: whether anything is preempted depends on no clock.
        always = {"num_kv_blocks": num_blocks, "max_decode_slowdown": float("inf")}
        config = EngineConfig(model=self.path, **always, **settings)  # type: ignore[arg-type]
        return Engine(config, executor=Borrowed(self._executor, self._capacity, num_blocks), text=self.text)


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    yield Demo()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def test_alone(demo: Demo) -> None:
    engine = demo.engine()
    for name, (prompt, count, text) in FIXTURES.items():
        (result,) = engine.generate([prompt], greedy(count))
        assert result.choices[0].text == text, name


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("budget", "num_seqs", "num_blocks"), [(512, 64, 1024), (16, 8, 1024), (7, 3, 64), (64, 64, 12)]
)
def test_mixed_in_one_batch(demo: Demo, budget: int, num_seqs: int, num_blocks: int, caching: bool) -> None:
    engine = demo.engine(
        num_blocks, max_num_batched_tokens=budget, max_num_seqs=num_seqs, enable_prefix_caching=caching
    )
    names = [*FIXTURES, *FIXTURES]
    random.Random(budget).shuffle(names)
    for _ in range(2):  # the second time the prompts are cached, if that is on
        results = engine.generate([FIXTURES[n][0] for n in names], [greedy(FIXTURES[n][1]) for n in names])
        for name, result in zip(names, results, strict=True):
            assert result.choices[0].text == FIXTURES[name][2], name
    assert engine.stats().kv_blocks_used == 0


def test_chat_template(demo: Demo) -> None:
    assert demo.text.chat_template is not None
    ids = demo.text.chat_template.encode([{"role": "user", "content": "hi"}])
    assert (len(ids), ids[:2], ids[-3:]) == (31, *CHATHI_IDS)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0.8, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
    ],
    ids=["greedy", "seeded", "penalty"],
)
def test_output_does_not_change_after_preemption(demo: Demo, params: SamplingParams) -> None:
    prompts = [f"Count: {n}, {n + 1}, {n + 2}," for n in range(1, 7)]
    calm = demo.engine().generate(prompts, params)
    tight_engine = demo.engine(12, enable_prefix_caching=False)
    tight = tight_engine.generate(prompts, params)
    assert tight_engine.stats().num_preemptions > 0
    for a, b in zip(calm, tight, strict=True):
        assert b.choices[0].token_ids == a.choices[0].token_ids and b.choices[0].text == a.choices[0].text
        assert b.num_cached_tokens == 0


def test_n_choices_are_distinct_repeatable_and_independent_of_neighbours(demo: Demo) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.2, seed=5, n=8, ignore_eos=True)
    first = demo.engine().generate(["Count: 1, 2, 3, 4,"], params)[0]
    crowd = demo.engine(max_num_batched_tokens=16).generate([FOX, "Count: 1, 2, 3, 4,", FOX * 3], params)[1]
    assert [c.text for c in crowd.choices] == [c.text for c in first.choices]
    assert len({c.text for c in first.choices}) >= 2


def test_a_seed_decides_whatever_the_place_in_a_list_of_prompts(demo: Demo) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.2, seed=5, ignore_eos=True)
    alike = [done.choices[0].token_ids for done in demo.engine().generate(["Count: 1, 2, 3, 4,"] * 8, params)]
    again = [done.choices[0].token_ids for done in demo.engine().generate(["Count: 1, 2, 3, 4,"] * 3, params)]
    assert len({*alike, *again}) == 1, "prompt and seed being the same, so is the answer"


@pytest.mark.parametrize(
    ("penalty", "ids"),
    [
        ({"repetition_penalty": 2.0}, (256, 37, 109)),
        ({"presence_penalty": 2.0}, (216, 37, 28, 216, 38, 28, 216, 39)),
        ({"frequency_penalty": 1.5}, (216, 37, 28, 216, 38, 28, 216, 39)),
    ],
)
def test_only_repetition_counts_the_prompt(demo: Demo, penalty: dict[str, float], ids: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, **penalty)  # type: ignore[arg-type]
    (done,) = demo.engine().generate(["Count: 1, 2, 3, 4,"], params)
    assert done.choices[0].token_ids[: len(ids)] == ids


@pytest.mark.parametrize("length", [16, 32, 33])
def test_a_prompt_that_is_all_in_the_cache(demo: Demo, length: int) -> None:
    prompt = [1000 + 7 * i for i in range(length)]
    engine = demo.engine()
    cold, warm = (engine.generate([prompt], greedy(8))[0] for _ in range(2))
    assert warm.choices[0].token_ids == cold.choices[0].token_ids
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (length - 1) // 16 * 16)


def test_prompt_logprobs_do_not_depend_on_order_or_chunking(demo: Demo) -> None:
    ids = demo.text.tokenizer.encode(FOX * 3 + "The end")
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)

    def score(engine: Engine, prompt: list[int]) -> list[float]:
        (result,) = engine.generate([prompt], params)
        assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(prompt)
        return [e.logprob for e in result.prompt_logprobs if e]

    whole = demo.engine()
    first = score(whole, ids)
    assert sum(first) == pytest.approx(-68.446, abs=0.05)
    assert score(whole, ids) == pytest.approx(first, abs=1e-3)
    for length in (15, 16, 17, 32):
        chunked = demo.engine(max_num_batched_tokens=8)
        assert score(chunked, ids[:length]) == pytest.approx(first[: length - 1], abs=1e-3)


def test_sliding_window_and_prefix_cache_agree(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = make_hf_dir(tmp_path_factory.mktemp("mistral"), "mistral", sliding_window=32)
    text = load_text(str(demo_gguf()))
    rng = random.Random(0)
    head = [rng.randrange(5, 200) for _ in range(96)]
    prompts = [[*head, 7, 8, 9, 10], [*head, 7, 8, 9, 10], [*head, 11, 12, 13]]

    def run(caching: bool) -> list[tuple[int, ...]]:
        config = EngineConfig(
            model=str(path), num_kv_blocks=64, num_threads=1, enable_prefix_caching=caching, dtype="float32"
        )
        engine = Engine(config, text=text)
        outs = [engine.generate([p], greedy(12))[0] for p in prompts]
        assert [o.num_cached_tokens for o in outs] == ([0, 96, 96] if caching else [0, 0, 0])
        return [o.choices[0].token_ids for o in outs]

    assert run(True) == run(False)


def test_one_stream_of_a_batch_can_be_aborted_at_any_step(demo: Demo) -> None:
    engine = demo.engine(64, max_num_batched_tokens=16)
    for i, (prompt, count, _) in enumerate(FIXTURES.values()):
        ids = tuple(demo.text.tokenizer.encode(prompt))
        engine.add(GenerateRequest(f"keep{i}", ids, greedy(count)))
        engine.add(GenerateRequest(f"drop{i}", ids, greedy(60)))
    texts: dict[str, str] = {}
    for step in range(10_000):
        if not engine.has_work:
            break
        for delta in engine.step():
            texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
        engine.abort(f"drop{step % len(FIXTURES)}") if step > 6 else None
    for i, (_, _, text) in enumerate(FIXTURES.values()):
        assert texts[f"keep{i}"] == text
    assert engine.stats().kv_blocks_used == 0
