"""Our own system under measurement: three processes started by the `specdec` command, and one stream through them.

Called by the suites.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.systems.up import UpSystem
from specdec.client.results import GenerationStats


@dataclass(frozen=True)
class SystemRun:
    """One greedy stream as the client saw it."""

    token_ids: list[int]
    ttft_s: float
    """Request sent to first tokens received."""
    e2el_s: float
    """Request sent to stream finished."""
    stats: GenerationStats
    num_cached_prompt_tokens: int
    num_first_tokens: int
    """Tokens of the first chunk."""

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second after the first chunk: prefill and admission left out."""
        return (len(self.token_ids) - self.num_first_tokens) / (self.e2el_s - self.ttft_s)

    @property
    def num_tested_tokens(self) -> int:
        """Draft tokens whose acceptance was decided: those accepted, and one for each round that refused one.

        A last round that is cut short by the token limit and fully accepted counts as a refusal: at most one a stream.
        """
        stats = self.stats
        full_rounds = stats.accepted_per_position[-1] if stats.accepted_per_position else 0
        return stats.num_accepted_tokens + stats.num_rounds - stats.num_target_only_steps - full_rounds


class RunningSystem(UpSystem):
    """`specdec up` with the models of a comparison, asked for one stream at a time."""

    def __init__(
        self,
        target_dir: Path,
        draft_dir: Path | None,
        dtype: str = "auto",
        device: str = "cpu",
        kv_cache_bytes: tuple[int, int] | None = None,
        lookup: Sequence[str] = (),
        drafts: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> None:
        """Start the system with the threads that `specdec up` chooses, no more than the peers get.

        Args:
            target_dir: a checkpoint.
            draft_dir: a checkpoint of the same vocabulary; None: target-only.
            dtype: as a service takes it.
            device: of both models.
            kv_cache_bytes: of target and draft. None is what `specdec up` gives each.
            lookup: kinds of drafts that need no draft replica, as `specdec up --draft` names them.
            drafts: further drafts, each as `--draft` takes it.
            flags: further ones of `specdec up`.
        """
        models = ["--target", str(target_dir)]
        models += ["--draft", str(draft_dir)] if draft_dir else [] if drafts else ["--replicas-draft", "0"]
        more_drafts = [word for draft in (*lookup, *drafts) for word in ("--draft", draft)]
        sizes = zip(("target", "draft"), kv_cache_bytes or (), strict=False)
        kv_flags = [word for role, size in sizes for word in (f"--kv-cache-bytes-{role}", str(size))]
        super().__init__([*models, *more_drafts, *kv_flags, *flags, "--device", device, "--dtype", dtype])

    def run(self, prompt_token_ids: list[int], max_new_tokens: int, **options: object) -> SystemRun:
        """Stream one output in a new session, timed at the client, and delete the session afterwards (untimed).

        Args:
            prompt_token_ids: BOS included.
            max_new_tokens: exactly this many are made: EOS is ignored.
            options: more keyword arguments of `Client.generate` (gamma, mode, temperature, seed).
        """
        fixed = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "stream": True}
        started = time.perf_counter()
        first, num_first_tokens = 0.0, 0
        with self.client.generate(prompt_token_ids=prompt_token_ids, **(fixed | options)) as stream:
            for chunk in stream:
                if not first:
                    first, num_first_tokens = time.perf_counter(), len(chunk.token_ids)
            finished = time.perf_counter()
            result = stream.result()
        self.client.delete_session(result.session_id)
        cached = result.usage.num_cached_prompt_tokens
        return SystemRun(
            list(result.token_ids), first - started, finished - started, result.stats, cached, num_first_tokens
        )


def acceptance(runs: list[SystemRun]) -> float:
    """alpha: accepted over tested draft tokens of all runs."""
    return sum(run.stats.num_accepted_tokens for run in runs) / max(1, sum(run.num_tested_tokens for run in runs))


def emitted_per_round(runs: list[SystemRun]) -> float:
    """tau: mean tokens emitted by one verify pass."""
    return sum(len(run.token_ids) for run in runs) / sum(run.stats.num_rounds for run in runs)


def mean_round_s(runs: list[SystemRun]) -> tuple[float, float, float]:
    """Return the mean seconds of a round: wait for the draft, wait for the verification, and the rest.

    The rest is the coordinator's own part with the stream to the client. Prefill is spread over the rounds.
    """
    num_rounds = sum(run.stats.num_rounds for run in runs)
    draft_s, verify_s = sum(run.stats.draft_s for run in runs), sum(run.stats.verify_s for run in runs)
    rest_s = sum(run.e2el_s for run in runs) - draft_s - verify_s
    return draft_s / num_rounds, verify_s / num_rounds, rest_s / num_rounds
