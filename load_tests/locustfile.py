"""For those who use locust: streamed chat answers, with TTFT and time per token as entries of their own.

locust -f load_tests/locustfile.py --headless -u 8 -r 2 -t 60s -H http://127.0.0.1:8000 --api-key KEY

Needs the extra `load` (pip install 'sluicegate[load]'). Locust's users wait for their answer before they send again:
a closed loop. The open loop is `python -m load_tests`.
"""

# mypy: disable-error-code="misc, untyped-decorator"
# locust is an extra: where it is not installed, all that comes from it is untyped.
from __future__ import annotations

import json
import time
from itertools import chain
from typing import Any
from uuid import uuid4

from locust import HttpUser, between, task
from locust import events as locust_events

from deployments.upstream.events import DONE, EventParser
from load_tests.prompts import Form, PromptWriter, Segment


@locust_events.init_command_line_parser.add_listener
def _arguments(parser: Any) -> None:
    parser.add_argument("--model", default="", help="default: the first the server lists")
    parser.add_argument("--api-key", default="", env_var="SLUICE_API_KEY", include_in_web_ui=False)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="about so many")
    parser.add_argument("--output-tokens", type=int, default=64)


class ChatUser(HttpUser):
    wait_time = between(0.5, 2.0)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        if options.api_key:
            self.client.headers["Authorization"] = f"Bearer {options.api_key}"
        self._model = options.model or self.client.get("/v1/models").json()["data"][0]["id"]
        self._writer = PromptWriter(Form("word"), 0)

    @task
    def chat(self) -> None:
        options = self.environment.parsed_options
        prompt = self._writer.text([Segment(uuid4().hex, options.prompt_tokens)])
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": options.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, arrivals, tokens, events = time.perf_counter(), [], 0, EventParser()
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="chat, whole answer"
        ) as answer:
            if answer.status_code != 200:
                answer.failure(f"http {answer.status_code}")
                return
            pieces = (events.feed(piece) for piece in answer.iter_content(chunk_size=None))
            for data in chain.from_iterable(pieces):
                if data == DONE:
                    continue
                event = json.loads(data)
                if "error" in event:
                    answer.failure(f"error event {event['error'].get('type')}")
                    return
                if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    arrivals.append(time.perf_counter())
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if not arrivals:
                answer.failure("no tokens")
                return
            # Locust would otherwise count until the headers.
            answer.request_meta["response_time"] = (time.perf_counter() - start) * 1000
            answer.success()
        self._report("time to first token", arrivals[0] - start)
        if (count := tokens or len(arrivals)) > 1:
            self._report("time per output token", (arrivals[-1] - arrivals[0]) / (count - 1))

    def _report(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="STREAM", name=name, response_time=seconds * 1000, response_length=0, exception=None
        )
