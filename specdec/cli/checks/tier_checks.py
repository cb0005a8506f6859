"""Checks of the cold tier of KV: settings of its Redis, and whether fetching KV beats computing it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.cli.metrics_page import read_page
from specdec.contract.errors import SpecdecError, Unavailable

#: Tokens for which both ways are compared.
_PROMPT_TOKENS = 1024
#: Tokens of one value of the tier, and its largest size, which leaves fewer to large models.
_RUN_TOKENS, _MAX_RUN_BYTES = 256, 64 << 20


def check_kv_tier(url: str, redis_url: str, model: Callable[[], str], metrics: Iterable[str]) -> Iterator[Finding]:
    """Check the Redis of `--kv-tier-url` and measure it.

    Args:
        url: URL of the tier.
        redis_url: URL of the session store; "" if it is not known.
        model: returns path or hub id of the model whose KV is kept; "" if it is not known.
        metrics: HOST:PORT of the metrics of replicas, which state how long they compute.
    """
    from specdec.state.kv_link import measure_tier

    try:
        rule, info = measure_tier(url)
    except Unavailable as error:
        yield fail("kv tier", error.message,
                   "start its Redis or correct --kv-tier-url; replicas compute KV again meanwhile")  # fmt: skip
        return
    yield _eviction(info)
    if redis_url and info.get("run_id") == _run_id(redis_url):
        yield fail("kv tier", "the tier and the sessions share one Redis: KV would evict sessions, or fill its memory",
                   "give --kv-tier-url a Redis of its own")  # fmt: skip
    token_bytes = _bytes_per_token(model())
    yield _break_even(rule, token_bytes, _replay_tokens_per_s(metrics, token_bytes))


def _eviction(info: dict[str, Any]) -> Finding:
    policy, limit = str(info.get("maxmemory_policy")), int(info.get("maxmemory") or 0)
    found = f"maxmemory-policy {policy}, maxmemory {limit / 1e6:.0f} MB" if limit else f"{policy}, no maxmemory"
    if not limit or not policy.startswith("allkeys"):
        return warn("kv tier eviction", f"{found}: it grows until it fails",
                    "set maxmemory, and maxmemory-policy allkeys-lru")  # fmt: skip
    return ok("kv tier eviction", found)


def _run_id(redis_url: str) -> str:
    """Return the id of the process of another Redis; "" if it does not tell."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(redis_url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
            return str(client.info("server").get("run_id", ""))
    except (RedisError, OSError, ValueError):
        return ""


def _break_even(rule: Any, token_bytes: int, replay_tokens_per_s: float) -> Finding:
    """Compare fetching with computing by `specdec.core.restore_rule`, for a prompt of a usual length."""
    found = f"{rule.bytes_per_s / 1e6:.0f} MB/s after {rule.latency_s * 1000:.2g} ms"
    if not token_bytes:
        return ok("kv tier speed", f"{found}; what a token takes is not known, see --endpoint")
    limit = _PROMPT_TOKENS / rule.restore_s(_PROMPT_TOKENS * token_bytes)
    found += f": fetching beats a prefill below about {limit:,.0f} tokens/s ({token_bytes / 1000:.0f} KB a token)"
    if not replay_tokens_per_s:
        return ok("kv tier speed", found)
    found += f"; the replicas compute {replay_tokens_per_s:,.0f}"
    if replay_tokens_per_s > limit:
        return warn("kv tier speed", f"{found}, so they rarely fetch",
                    "place the tier nearer to the replicas, or run without --kv-tier-url")  # fmt: skip
    return ok("kv tier speed", found)


def _bytes_per_token(model: str) -> int:
    """Return the bytes of KV of a token in 16 bits; 0 if the model's files are not on this machine."""
    if not Path(model).expanduser().is_dir():
        return 0
    from specdec.checkpoints.model_size import model_size

    try:
        return model_size(model).kv_bytes_per_token
    except (SpecdecError, OSError, ValueError):
        return 0


def _replay_tokens_per_s(metrics: Iterable[str], token_bytes: int) -> float:
    """Return the median speed at which replicas expect to compute KV again; 0 if none states it."""
    pages = filter(None, map(read_page, metrics))
    times = [seconds for page in pages if (seconds := page.total("kv_tier_replay_seconds", role="target"))]
    run_tokens = min(_RUN_TOKENS, _MAX_RUN_BYTES // token_bytes) if token_bytes else _RUN_TOKENS
    return run_tokens / median(times) if times else 0.0
