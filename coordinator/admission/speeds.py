"""Measured speeds of streams, and what they predict: how long a request will generate, and how many may run at once.

`slots` reports every chunk of tokens and every end, and asks for predictions when a request arrives. The speed of a
stream depends on how many streams share its target, so it is kept by that number.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

#: Number of streams of one target that the limit starts from. Its speed is what the limit compares with, so the limit
#: never falls below it.
BASE_STREAMS = 16

#: The limit rises while more streams gain at least this: the growth of tokens per second relative to that of streams.
#: So a token takes at most about ten times as long as if one stream had the target for itself.
RAISE_GAIN = 0.1

#: The limit falls if its last streams gain less than this.
LOWER_GAIN = 0.05

#: Where a tenant uses less than its share, a token may take this many times as long as with one stream alone.
SHARED_SLOWDOWN = 1.6

#: Output tokens of a request while fewer than `_MIN_LENGTHS` outputs have ended; its own limit may be lower.
UNKNOWN_OUTPUT_TOKENS = 256

_MIN_LENGTHS = 8
_MAX_LENGTHS = 128
_LENGTH_QUANTILE = 0.95
_KEEP = 0.9
_MAX_RATE_TOKENS = 2_000.0
_MIN_WINDOW_CHUNKS = 64
_WINDOW_CHUNKS_PER_STREAM = 4


class OutputLength(NamedTuple):
    """Numbers of output tokens that a request states."""

    least: int
    most: int


class _Rate:
    """Seconds per token of a stream, over about the last `_MAX_RATE_TOKENS` tokens."""

    __slots__ = ("num_tokens", "seconds")

    def __init__(self) -> None:
        self.num_tokens, self.seconds = 0.0, 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens += num_tokens
        self.seconds += seconds
        if self.num_tokens > _MAX_RATE_TOKENS:
            self.num_tokens /= 2.0
            self.seconds /= 2.0

    @property
    def token_s(self) -> float:
        return self.seconds / self.num_tokens


class _Mean:
    """An exponential mean; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else _KEEP * self.value + (1.0 - _KEEP) * value


class StreamSpeeds:
    """Speeds of the streams of one coordinator, by the number of streams of a target. Used from one event loop."""

    def __init__(self) -> None:
        self._rates: dict[int, _Rate] = {}
        """Rates by the power of two that the number of streams is rounded up to."""
        self._first_token_s = _Mean()
        self._running_s = _Mean()
        self._recent_lengths: deque[int] = deque(maxlen=_MAX_LENGTHS)
        self._sorted_lengths: list[int] = []

    def note_chunk(self, num_tokens: int, seconds: float, num_streams: int) -> None:
        """Note that a stream made tokens in `seconds` while `num_streams` streams shared its target."""
        exponent = max(num_streams - 1, 0).bit_length()
        self._rates.setdefault(exponent, _Rate()).add(num_tokens, seconds)

    def note_first_token(self, seconds: float) -> None:
        """Note the time from the start of a request to its first token."""
        self._first_token_s.add(seconds)

    def note_end(self, num_tokens: int | None, running_s: float) -> None:
        """Note a request that held its slot for `running_s`; `num_tokens`: its output, None if it is incomplete."""
        self._running_s.add(running_s)
        if num_tokens is None:
            return
        if len(self._recent_lengths) == _MAX_LENGTHS:
            self._sorted_lengths.remove(self._recent_lengths[0])
        self._recent_lengths.append(num_tokens)
        insort(self._sorted_lengths, num_tokens)

    def token_s(self, num_streams: int) -> float | None:
        """Return the time per token with that many streams, or with the nearest number measured; None: unknown."""
        exponent = max(num_streams - 1, 0).bit_length()
        if not self._rates:
            return None
        return self._rates[min(self._rates, key=lambda known: (abs(known - exponent), known))].token_s

    def measured_token_s(self, num_streams: int) -> float | None:
        """Return the time per token with that many streams; None if it was not measured."""
        rate = self._rates.get(max(num_streams - 1, 0).bit_length())
        return None if rate is None else rate.token_s

    @property
    def has_seen_end(self) -> bool:
        """Return whether any request has ended."""
        return self._running_s.value is not None

    def generation_s(self, length: OutputLength, num_streams: int) -> float | None:
        """Return the time that a request will probably generate for, at most; None while no speed is known.

        Few outputs reach a large limit, so a request is taken for as long as nearly all recent outputs.
        """
        token_s = self.token_s(num_streams)
        if token_s is None:
            return None
        num_tokens = max(length.least, min(length.most, self._usual_length()))
        return (self._first_token_s.value or 0.0) + num_tokens * token_s

    def running_s(self, length: OutputLength, num_streams: int) -> float:
        """Return the time for which a request will probably hold its slot; 0 while nothing is known."""
        if self._running_s.value is None:
            return self.generation_s(length, num_streams) or 0.0
        return max(self._running_s.value, length.least * (self.token_s(num_streams) or 0.0))

    def _usual_length(self) -> int:
        if len(self._sorted_lengths) < _MIN_LENGTHS:
            return UNKNOWN_OUTPUT_TOKENS
        return self._sorted_lengths[int(_LENGTH_QUANTILE * (len(self._sorted_lengths) - 1))]


def stream_gain(base_s: float, token_s: float, num_streams: float, at_streams: float) -> float:
    """Return the growth of a target's tokens per second with `at_streams` streams, relative to that of the streams.

    1: each further stream is as fast as the others are. 0: it only slows them down. The time per token is taken to grow
    by as much with each stream, as that of a forward pass does.

    Args:
        base_s: time per token with `BASE_STREAMS` streams.
        token_s: time per token with `num_streams` streams.
        num_streams: a number above `BASE_STREAMS`.
        at_streams: number of streams to predict for.
    """
    per_stream_s = max(0.0, token_s - base_s) / (num_streams - BASE_STREAMS)
    if not per_stream_s:
        return 1.0
    alone_s = max(0.0, base_s - per_stream_s * BASE_STREAMS)
    return alone_s / (alone_s + per_stream_s * at_streams)


class RunningLimit:
    """Number of requests that may run at once: fixed, or chosen from the measured time per token.

    The limit starts at `BASE_STREAMS` for each target. It rises while requests wait and more streams make more tokens
    per second, as on a GPU whose steps are limited by the read of the weights. It falls if they do not. Requests that
    wait for KV blocks make no tokens, so the limit does not rise beyond the KV of the targets.
    """

    def __init__(self, speeds: StreamSpeeds, num_targets: Callable[[], int], fixed: int | None = None) -> None:
        self._speeds = speeds
        self._num_targets = num_targets
        self._fixed = fixed
        self._per_target = BASE_STREAMS
        self._window = _Rate()
        self._num_window_chunks = 0
        self._is_wanted = False
        """True if a request found no slot in this window."""
        self._is_settled = False
        """True if the limit did not rise at the end of the last window in which requests waited."""

    @property
    def value(self) -> int:
        return self._fixed or self._per_target * self._targets

    @property
    def is_settled(self) -> bool:
        """Return whether the limit no longer rises, so that waits can be predicted.

        Speeds that were measured while it rose say little, and a length that was never seen is a guess.
        """
        known = (self._fixed is not None, self._is_settled, self._speeds.has_seen_end)
        return known.count(True) > 1

    @property
    def shared_value(self) -> int:
        """Limit while a tenant uses less than its share: a stream then keeps about half of its speed alone.

        It is the usual limit as long as the speed of a stream alone was not measured.
        """
        alone_s = self._speeds.measured_token_s(1)
        if alone_s is None:
            return self.value
        num_streams = self.streams_per_target(self.value)
        while num_streams > 1 and (self._speeds.token_s(num_streams) or 0.0) > SHARED_SLOWDOWN * alone_s:
            num_streams //= 2
        return min(self.value, num_streams * self._targets)

    def streams_per_target(self, num_running: int) -> int:
        return -(-num_running // self._targets)

    def note_wanted(self) -> None:
        """Note that a request found no slot."""
        self._is_wanted = True

    def note_chunk(self, num_tokens: int, seconds: float, num_running: int) -> None:
        """Note that a stream made tokens in `seconds` while `num_running` streams made some."""
        self._speeds.note_chunk(num_tokens, seconds, self.streams_per_target(num_running))
        self._window.add(num_tokens, seconds)
        self._num_window_chunks += 1
        if self._num_window_chunks >= max(_MIN_WINDOW_CHUNKS, _WINDOW_CHUNKS_PER_STREAM * num_running):
            before = self._per_target
            if self._fixed is None:
                self._adapt(self._window.token_s, self.streams_per_target(num_running))
            if self._is_wanted:
                self._is_settled = self._per_target <= before
            self._window, self._num_window_chunks, self._is_wanted = _Rate(), 0, False

    def _adapt(self, token_s: float, num_streams: int) -> None:
        """Change the limit after a window in which a token took `token_s` with `num_streams` streams of a target."""
        base_s = self._speeds.measured_token_s(BASE_STREAMS)
        if base_s is None:
            return
        is_more = num_streams > BASE_STREAMS
        # Streams that have begun run to their end, so a limit that was too high is felt for long. The gain of the next
        # limit is therefore predicted.
        gain = partial(stream_gain, base_s, token_s, num_streams)
        if is_more and gain(num_streams) < LOWER_GAIN:
            self._per_target = max(BASE_STREAMS, self._per_target - max(1, self._per_target // 8))
        elif self._is_wanted and num_streams >= self._per_target * 3 // 4:
            # A batch that comes at once is to run soon. Nothing is known of more streams than were tried so far.
            quarter = self._per_target // 4
            steps = (self._per_target, quarter) if is_more else (quarter,)
            worthwhile = (step for step in steps if not is_more or gain(self._per_target + step) >= RAISE_GAIN)
            self._per_target += next(worthwhile, 0)

    @property
    def _targets(self) -> int:
        return max(1, self._num_targets())
