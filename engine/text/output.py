"""Generated ids to text, one token at a time: detokenization, stop strings, logprob alignment."""

from __future__ import annotations

import codecs
from collections import deque

from engine.text.stop import StopStrings
from engine.text.tokenizer import Tokenizer
from engine.types import SamplingParams, TokenLogprob


class TextStream:
    """The text of one choice. Work per token does not grow with the text; released text is never taken back.

    Text is the bytes of `text_before` and of all tokens joined and read as UTF-8, as Tokenizer.decode would in one go.
    Held back are incomplete characters and whatever may begin a stop string. A stop string that is a control token's
    text stops on that token, though its text is skipped. A logprob entry is released with the first character of its
    token's text (a token that completes a character: with that character); entries of tokens that add no text go along
    with their neighbours; entries of tokens behind a cut, and of the token that ended generation, are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        special = tokenizer.special_tokens
        self._stop_ids = frozenset(special[s] for s in params.stop if s in special)
        self._stops = StopStrings(params.stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(params.text_before)
        self._num_tokens = 0
        self._num_decoded = 0  # characters
        self._num_released = 0
        self._unreleased: list[str] = []
        self._entries: deque[tuple[int, TokenLogprob]] = deque()  # (where the token's text begins, entry)
        self._ended = False

    def push(self, token_id: int, logprob: TokenLogprob | None, final: bool) -> bool:
        """Take the next token; True if a stop string ends the text here (push no more then).

        `final`: an eos or stop token id that ended generation; it adds no text.
        """
        self._num_tokens += 1
        armed = self._num_tokens >= self._min_tokens
        if armed and token_id in self._stop_ids:
            self._end_at_token(token_id, logprob)
            return True
        if final:
            return False
        if logprob is not None:
            self._entries.append((self._num_decoded, logprob))
        if self._skip_special and self._tokenizer.is_special(token_id):
            return False
        return self._append(self._decoder.decode(self._tokenizer.token_bytes(token_id)), armed)

    def take(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """What may be released and has not been."""
        text = "".join(self._unreleased)
        free = len(text) - (0 if self._ended else self._stops.held)
        self._unreleased = [text[free:]] if free < len(text) else []
        self._num_released += free
        entries = []
        while self._entries and (self._ended or self._entries[0][0] < self._num_released):
            entries.append(self._entries.popleft()[1])
        return text[:free], tuple(entries)

    def finish(self) -> None:
        """No more tokens: the next take() releases the rest. An incomplete character becomes U+FFFD."""
        if not self._ended:
            self._append(self._decoder.decode(b"", final=True), self._num_tokens >= self._min_tokens)
            self._ended = True

    def _append(self, text: str, armed: bool) -> bool:
        if not text:
            return False
        match = self._stops.feed(text, armed)
        begin = self._num_decoded
        self._num_decoded += len(text)
        self._unreleased.append(text)
        if match is None:
            return False
        self._cut(begin + (match.end if self._include_stop else match.start))
        return True

    def _cut(self, at: int) -> None:
        """End the text at character `at`, which is not released yet."""
        self._unreleased = ["".join(self._unreleased)[: at - self._num_released]]
        while self._entries and self._entries[-1][0] >= at:
            self._entries.pop()
        self._ended = True

    def _end_at_token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self.finish()
        if not self._include_stop:
            return
        if logprob is not None:
            self._entries.append((self._num_decoded, logprob))
        self._unreleased.append(self._tokenizer.token_text(token_id))
