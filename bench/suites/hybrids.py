"""Suite `hybrids`: what recurrent layers cost under speculation: speed, memory of states, rows that run again.

A random model of the shape of Qwen3.5 0.8B with a small vocabulary, and its first tenth as the draft, whose agreement
is dialled to 0.7. Both run in float32 by our own recurrent rows; one stream, greedy.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3_5TextConfig

from bench.harness.pairs import MIN_PAIRS, median_ratio, take_turns
from bench.harness.rows import Origin, Row
from bench.harness.scrape import total
from bench.harness.workload import prompt_token_ids
from bench.systems.ours import RunningSystem, SystemRun, acceptance
from bench.systems.random_pair import write_random_pair
from specdec.checkpoints.model_size import model_size
from specdec.cli.top import metrics_addresses_of

SUITE = "hybrids"
NUM_QUICK_PAIRS = 2
GAMMA, ALPHA, LEAST_RATIO, MOST_STATES = 4, 0.7, 1.0, 2.1
_NUM_TOKENS, _NUM_QUICK_TOKENS = 64, 12
_PROMPT_TOKENS = 64


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress."""
    row = partial(
        Row, suite=SUITE, origin=Origin(), quick=arguments.quick, case="Qwen3.5 shape, 30 layers, draft of 3"
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        pair = write_random_pair(
            _shape(quick=arguments.quick), 3, ALPHA, Path(folder), "cpu", dtype=torch.float32
        )  # fmt: skip
        with RunningSystem(pair.target.directory, pair.draft.directory, "float32") as system:
            return [
                row(system="draft", metric="agreement", value=pair.agreement, unit="ratio"),
                *_speed_rows(system, pair.target.directory, row, quick=arguments.quick),
                *_state_rows(system, pair.target.directory, row, quick=arguments.quick),
            ]


def _shape(*, quick: bool) -> Qwen3_5TextConfig:
    """Every fourth layer attends, as in the published models; among the first three layers one does."""
    width, heads = (256, 4) if quick else (1024, 16)
    return Qwen3_5TextConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=30, head_dim=128,
        layer_types=["full_attention" if layer % 4 == 1 else "linear_attention" for layer in range(30)],
        num_attention_heads=heads // 2, num_key_value_heads=2, linear_num_key_heads=heads, linear_num_value_heads=heads,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def _speed_rows(system: RunningSystem, target: Path, row: Callable[..., Row], *, quick: bool) -> list[Row]:
    prompts = prompt_token_ids(target, _PROMPT_TOKENS)
    num_pairs = NUM_QUICK_PAIRS if quick else MIN_PAIRS
    num_tokens = _NUM_QUICK_TOKENS if quick else _NUM_TOKENS
    drafted: list[SystemRun] = []

    def rate(options: dict[str, object], index: int) -> float:
        run = system.run(prompts[index % len(prompts)], num_tokens, temperature=0.0, **options)
        if options["mode"] != "off":
            drafted.append(run)
        return run.decode_tokens_per_s

    systems = {
        "no speculation": partial(rate, {"mode": "off"}),
        "specdec": partial(rate, {"mode": "rejection", "gamma": GAMMA}),
    }
    rates = take_turns("tokens/s", systems, range(num_pairs), [0])
    ratio = median_ratio(rates["specdec"], rates["no speculation"])
    return [
        *(
            row(system=name, metric="tokens_per_s", value=float(np.median(each)), unit="tokens/s")
            for name, each in rates.items()
        ),
        row(
            system="specdec", metric="tokens_per_s_ratio", unit="x", ratio_to="no speculation", required=LEAST_RATIO,
            **ratio.fields,
        ),
        row(system="specdec", metric="acceptance", value=acceptance(drafted), unit="ratio"),
    ]  # fmt: skip


def _state_rows(system: RunningSystem, target: Path, row: Callable[..., Row], *, quick: bool) -> list[Row]:
    """Return the states that a session holds at gamma 8, and the rows a round that run again."""
    prompt = prompt_token_ids(target, _PROMPT_TOKENS)[0]

    def read(name: str, **labels: str) -> float:
        addresses = metrics_addresses_of(system.endpoint)
        return sum(total(address, f"specdec:{name}", role="target", **labels) for address in addresses)

    began = read("replayed_tokens_total")
    with system.client.generate(
        prompt_token_ids=prompt, max_new_tokens=_NUM_QUICK_TOKENS if quick else _NUM_TOKENS, ignore_eos=True,
        stream=True, temperature=0.0, mode="rejection", gamma=8,
    ) as stream:  # fmt: skip
        held = 0.0
        for _ in stream:
            held = max(held, read("recurrent_state_bytes", of="sessions"))
        result = stream.result()
    system.client.delete_session(result.session_id)
    # The planner counts windows of convolutions in two bytes a number.
    one = model_size(str(target)).state_bytes
    rounds = result.stats.num_rounds
    return [
        row(system="specdec", metric="states_per_session", value=held / one, unit="ratio", at_most=MOST_STATES),
        row(
            system="specdec",
            metric="replayed_rows_per_round",
            value=(read("replayed_tokens_total") - began) / rounds,
            unit="rows",
        ),
    ]
