"""`specdec advise --target MODEL`: lists drafts that fit a target, with their memory and the gain to expect.

Candidates are the models given by `--draft`, smaller models beside the target or in the cache of the Hugging Face hub,
small relatives of a target on the hub, and drafts that need no other model. The gain is a calculation, not a
measurement: Leviathan et al. 2023 give the tokens per step for an acceptance alpha, and the cost of a draft token is
its share of the target's weights, because reading weights takes most of the time of a small batch. alpha is measured
where the system at `--endpoint` runs the draft; otherwise the gain is listed for two assumed values.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.checkpoints.cross_vocabulary.pair_preflight import require_servable_pair
from specdec.checkpoints.model_size import ModelSize, model_size
from specdec.checkpoints.preflight import model_config, require_servable
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.pool_tables import model_name, print_table
from specdec.cli.request_flags import add_client_flags, connect
from specdec.contract.errors import SpecdecError

#: Acceptances for which the gain is listed if none is measured.
ASSUMED_ALPHAS = (0.6, 0.8)

#: Longest draft considered; a longer one seldom pays.
_MAX_GAMMA = 8
#: Largest share of the target's weights that a draft found on this machine may have.
_MAX_COST = 0.5

#: Small models on the hub by the target's model type. Each is listed only if its tokenizer fits the target's.
_RELATIVES = {
    "gemma3_text": ("google/gemma-3-270m-it", "google/gemma-3-1b-it"),
    "llama": ("meta-llama/Llama-3.2-1B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "qwen2": ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen3": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"),
}

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
#: Share of the target's layers in the early exit that is listed.
_EXIT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Advice:
    """One draft that fits the target."""

    draft: str
    """Value for `specdec up --draft`."""
    memory_bytes: int
    """Memory of its weights, beside the target's."""
    kv_bytes_per_token: int
    cost: float
    """Cost of a draft token relative to a step of the target."""
    gains: Mapping[str, float]
    """Tokens per second relative to the target alone, by acceptance."""
    basis: str
    """Source of the acceptance: measured, or assumed."""
    note: str
    """Requirement of the draft, or the vocabulary that it shares with the target."""


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("advise", help="list drafts that fit a target, with memory and expected gain",
                                 allow_abbrev=False)  # fmt: skip
    add_client_flags(parser, environ)
    parser.add_argument("--target", required=True, metavar="PATH_OR_HUB_ID", help="target model")
    parser.add_argument("--draft", action="append", default=[], metavar="PATH_OR_HUB_ID",
                        help="draft model to assess as well; may be repeated")  # fmt: skip
    parser.add_argument("--dtype", choices=_DTYPE_BYTES, default="bfloat16", help="type of the drafts' weights")
    add_json_flag(parser, "a table")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the advice. Raises SpecdecError if the target, or a draft given by `--draft`, cannot be served."""
    require_servable(args.target, flag="--target")
    target = model_size(args.target)
    measured = _measured_alphas(args)
    advices = [*_model_advices(args, target, measured), *_advices_without_model(target, measured)]
    if args.json:
        print_json({"target": asdict(target), "drafts": [asdict(advice) for advice in advices]})
        return 0
    about = "about " if target.is_estimate else ""
    states = f", {_bytes(2 * target.state_bytes)} of recurrent states a session" if target.state_bytes else ""
    size = f"{about}{_millions(target.num_parameters)}, {target.num_layers} layers{states}"
    print(f"target {model_name(args.target)}: {size}\n")
    columns = {
        "draft": "left",
        "weights": "right",
        "KV/token": "right",
        "cost": "right",
        "speed": "left",
        "note": "left",
    }
    print_table(columns, list(map(_row, advices)), environ)
    print(
        f"\nweights: memory as {args.dtype}. cost: of a draft token, in steps of the target. speed: tokens per second\n"
        "against the target alone, calculated from the cost and the accepted share, without\n"
        "network and sampling; `specdec bench` measures it on a running system."
    )
    return 0


def speedup(alpha: float, cost: float) -> float:
    """Return tokens per second relative to the target alone, with the best draft length up to 8.

    Source: Leviathan, Kalman and Matias 2023, theorem 3.8.
    """
    best = 1.0
    for gamma in range(1, _MAX_GAMMA + 1):
        num_tokens = sum(alpha**accepted for accepted in range(gamma + 1))
        best = max(best, num_tokens / (gamma * cost + 1.0))
    return best


def _measured_alphas(args: argparse.Namespace) -> dict[str, float]:
    """Return the measured acceptance of each draft of a running system, by pool and by model; {} if none runs."""
    with connect(args, timeout=5.0) as client:
        try:
            pools = [pool for pool in client.info().pools if pool.role == "draft" and pool.alpha is not None]
        except SpecdecError:
            return {}
    return {
        name: pool.alpha for pool in pools if pool.alpha is not None for name in (pool.name, model_name(pool.model))
    }


def _model_advices(args: argparse.Namespace, target: ModelSize, measured: Mapping[str, float]) -> Iterator[Advice]:
    for model in args.draft:
        yield _model_advice(args, model, target, measured)
    for model in [*map(str, _models_nearby(args.target)), *_relatives(args.target)]:
        if model not in args.draft:
            try:
                advice = _model_advice(args, model, target, measured)
            except SpecdecError:
                continue  # not on this machine or the hub, or not a draft for this target
            if advice.cost <= _MAX_COST:
                yield advice


def _model_advice(args: argparse.Namespace, draft: str, target: ModelSize, measured: Mapping[str, float]) -> Advice:
    common = require_servable_pair({"--target": args.target, "--draft": draft})
    size = model_size(draft)
    cost = size.num_parameters / max(1, target.num_parameters)
    gains, basis = _gains(cost, measured.get(model_name(draft)))
    memory_bytes = size.num_parameters * _DTYPE_BYTES[args.dtype]
    note = common or "same vocabulary"
    if size.state_bytes:
        note = f"{_bytes(size.state_bytes)} of recurrent states; {note}"
    if max(gains.values()) <= 1.0:
        note = f"do not use this draft: it costs more than it gains; {note}"
    return Advice(draft, memory_bytes, size.kv_bytes_per_token, cost, gains, basis, note)


def _advices_without_model(target: ModelSize, measured: Mapping[str, float]) -> Iterator[Advice]:
    gains, basis = _gains(0.0, measured.get("suffix"))
    yield Advice("suffix", 0, 0, 0.0, gains, basis, "pays on text that repeats")
    if target.state_bytes:
        return  # a target with recurrent layers makes no drafts
    if target.num_mtp_layers:
        cost = target.num_mtp_layers / max(1, target.num_layers)
        gains, basis = _gains(cost, measured.get("mtp"))
        yield Advice("mtp", 0, 0, cost, gains, basis, "layers of the target's own checkpoint")
    num_layers = max(1, round(_EXIT_SHARE * target.num_layers))
    if num_layers < target.num_layers:
        cost = num_layers / target.num_layers
        gains, basis = _gains(cost, measured.get("early-exit"))
        yield Advice(
            f"early-exit:{num_layers}", 0, 0, cost, gains, basis, "needs an adapter: specdec distill trains it"
        )


def _gains(cost: float, alpha: float | None) -> tuple[Mapping[str, float], str]:
    alphas: Sequence[float] = ASSUMED_ALPHAS if alpha is None else (alpha,)
    return {f"{each:.2f}": round(speedup(each, cost), 2) for each in alphas}, "assumed" if alpha is None else "measured"


def _models_nearby(target: str) -> Iterator[Path]:
    """Yield checkpoints in the target's parent directory, and in the hub's cache, except the target itself."""
    path = Path(target).expanduser()
    folders = sorted(path.resolve().parent.iterdir()) if path.exists() else []
    for folder in [*folders, *_cached_models()]:
        if (
            (folder / "config.json").is_file()
            and folder.resolve() != path.resolve()
            and any(folder.glob("*.safetensors"))
        ):
            yield folder


def _relatives(target: str) -> Sequence[str]:
    """Return small models on the hub of the target's type; none for a target on this machine."""
    if Path(target).expanduser().exists():
        return ()
    model_type = model_config(target)["model_type"]
    return [model for model in _RELATIVES.get(model_type, ()) if model != target]


def _cached_models() -> Iterator[Path]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = scan_cache_dir()
    except CacheNotFound:
        return
    for repository in sorted(cached.repos, key=lambda each: each.repo_id):
        for revision in repository.revisions:
            if repository.repo_type == "model":
                yield revision.snapshot_path


def _row(advice: Advice) -> list[str]:
    memory, kv = (_bytes(count) if count else "none" for count in (advice.memory_bytes, advice.kv_bytes_per_token))
    expected = ", ".join(f"{gain:.1f}x at {float(alpha):.0%}" for alpha, gain in advice.gains.items())
    return [_shown(advice.draft), memory, kv, f"{advice.cost:.2f}", f"{expected} {advice.basis}", advice.note]


def _shown(draft: str) -> str:
    return draft if len(draft) <= 24 else f"…/{model_name(draft)}"


def _millions(num_parameters: int) -> str:
    if num_parameters >= 10**9:
        return f"{num_parameters / 1e9:.1f} billion parameters"
    return f"{num_parameters / 1e6:.1f} million parameters"


def _bytes(count: int) -> str:
    for size, unit in ((10**9, "GB"), (10**6, "MB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
