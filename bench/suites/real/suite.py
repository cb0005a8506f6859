"""Suite `real`: SmolLM2-135M-Instruct on this CPU, one stream and eight, against Transformers and llama.cpp.

The peers get the same GGUF file, or one made of the same weights (Q8_0, BF16, F16), the same threads and prompts, and
the same number of greedy tokens; ours and llama.cpp keep the system prompt that all have in common. Ours runs target-
only: no smaller model has its vocabulary, so neither specdec nor Transformers has a draft model; Transformers' prompt
lookup needs none. `files` compares GGUF files in specdec and in llama.cpp's server. Needs `make real`; llama.cpp is
left out where `llama-cpp-python` is not installed.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.pairs import interleave, rate_rows, ratio_row, take_turns
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.streams import StreamProcess, StreamRequest, tokens_per_s
from bench.harness.workload import NUM_THREADS, chat_prompts
from bench.suites.real.files import file_rows
from bench.systems.bare import BareProcess
from bench.systems.gguf_writing import rewrite
from bench.systems.llama_cpp import LlamaProcess, is_installed
from bench.systems.ours import RunningSystem, SystemRun
from bench.systems.real_models import SMOLLM2
from bench.systems.served import smollm2_bf16, write_checkpoint
from bench.systems.transformers import PeerProcess, PeerRun
from specdec.checkpoints.vocabulary import load_tokenizer

SUITE = "real"
CASE = "SmolLM2-135M-Instruct"
NUM_PAIRS, NUM_QUICK_PAIRS = 9, 2
NUM_TOKENS, NUM_QUICK_TOKENS = 96, 24
NUM_STREAMS = 8
LOOKUP_TOKENS = 4
STEP_CONTEXT = 100

OURS, OURS_INT8, OURS_KEPT, OURS_WIDENED = "specdec", "specdec_int8", "specdec_bf16", "specdec_bf16_as_float32"
PLAIN, LOOKUP, BATCH = "hf_plain", "hf_prompt_lookup", "hf_padded_batch"
LLAMA = {kind: f"llama.cpp_{kind.lower()}" for kind in ("Q4_1", "Q8_0", "BF16", "F16")}

#: Comparisons of one stream, and the ratio that each must reach.
RATIOS: tuple[tuple[str, str, float | None], ...] = (
    (OURS, PLAIN, 5.0),
    (OURS, LOOKUP, None),
    (OURS_KEPT, OURS_WIDENED, None),
    (OURS_INT8, LLAMA["Q8_0"], 0.8),
    (OURS_KEPT, LLAMA["BF16"], 0.9),
    (OURS_KEPT, LLAMA["F16"], None),
    (OURS, LLAMA["Q4_1"], None),
    (OURS_INT8, PLAIN, None),
)


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress."""
    quick = arguments.quick
    try:
        model = SMOLLM2.path()
    except FileNotFoundError as error:
        raise SystemExit(f"error: {error}") from None
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder, ExitStack() as stack:
        checkpoint = Path(folder) / "float32"
        write_checkpoint(model, checkpoint, "float32")
        bf16 = smollm2_bf16(Path(folder))
        ours = {
            name: stack.enter_context(RunningSystem(path, None, dtype=dtype))
            for name, path, dtype in (
                (OURS, model, "auto"), (OURS_INT8, model, "int8"), (OURS_KEPT, bf16.checkpoint, "auto"),
                (OURS_WIDENED, bf16.checkpoint, "float32"),
            )
        }  # fmt: skip
        peer = stack.enter_context(PeerProcess(checkpoint, None, NUM_THREADS))
        num_tokens = NUM_QUICK_TOKENS if quick else NUM_TOKENS
        greedy = {"max_new_tokens": num_tokens, "mode": "off", "temperature": 0.0}
        runs: dict[str, Callable[[list[int]], Any]] = {name: partial(each.run, **greedy) for name, each in ours.items()}
        for name in (PLAIN, LOOKUP):
            runs[name] = partial(peer.run, name.removeprefix("hf_"), max_new_tokens=num_tokens, gamma=LOOKUP_TOKENS)
        if is_installed():
            files = {"Q4_1": model, "BF16": bf16.gguf}
            files |= {kind: rewrite(model, Path(folder) / f"{kind}.gguf", kind) for kind in ("Q8_0", "F16")}
            for kind, path in files.items():
                llama = stack.enter_context(LlamaProcess(path, NUM_THREADS))
                runs[LLAMA[kind]] = partial(llama.run, max_new_tokens=num_tokens)
        systems = {name: partial(_rate, run_stream, num_tokens) for name, run_stream in runs.items()}
        prompts = _prompt_token_ids(checkpoint)
        rows = [
            *_one_stream(systems, prompts, quick),
            *_steps(bf16.checkpoint, quick),
            *_eight_streams(stack.enter_context(StreamProcess(ours[OURS].endpoint)), peer, prompts, quick),
        ]
    return rows + file_rows(partial(Row, suite=SUITE, origin=Origin(), quick=quick), quick=quick)


def _prompt_token_ids(checkpoint: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(checkpoint)
    conversations = ([{"role": "user", "content": text}] for text in chat_prompts())
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False),
            add_special_tokens=False,
        )
        for conversation in conversations
    ]


def _rate(run: Callable[[list[int]], SystemRun | PeerRun], num_tokens: int, prompt: list[int]) -> float:
    """Return tokens a second, prompt included."""
    return num_tokens / run(prompt).e2el_s


def _one_stream(systems: dict[str, Callable[[list[int]], float]], prompts: list[list[int]], quick: bool) -> list[Row]:
    num_pairs = NUM_QUICK_PAIRS if quick else NUM_PAIRS
    rates = take_turns("one stream", systems, prompts[:num_pairs], prompts[-1:])
    row = partial(Row, suite=SUITE, case=f"{CASE}, one stream", origin=Origin(), quick=quick)
    found = [ratio_row(row, rates, *names, required=least) for *names, least in RATIOS if set(names) <= set(rates)]
    return found + rate_rows(row, rates)


def _steps(checkpoint: Path, quick: bool) -> list[Row]:
    """Compare our step with 16-bit weights with the same step on float32 weights: one row, and five rows."""
    num_pairs = NUM_QUICK_PAIRS if quick else NUM_PAIRS
    models = {OURS_KEPT: (checkpoint, "auto"), OURS_WIDENED: (checkpoint, "float32")}
    rows: list[Row] = []
    with BareProcess(models, NUM_THREADS) as bare, progress("steps", 2 * 2 * num_pairs) as advance:
        for num_rows, required in ((1, 1.6), (5, None)):
            rate = {name: partial(_steps_per_s, bare, name, num_rows) for name in models}
            rates = interleave([STEP_CONTEXT] * num_pairs, rate, advance)
            case = f"{CASE}, step of {num_rows} row{'s' * (num_rows > 1)}"
            row = partial(Row, suite=SUITE, case=case, origin=Origin(), quick=quick)
            rows.append(ratio_row(row, rates, OURS_KEPT, OURS_WIDENED, metric="steps_per_s_ratio", required=required))
    return rows


def _steps_per_s(bare: BareProcess, name: str, num_rows: int, context_tokens: int) -> float:
    return 1 / bare.step_s(name, context_tokens, num_rows)


def _eight_streams(clients: StreamProcess, peer: PeerProcess, prompts: list[list[int]], quick: bool) -> list[Row]:
    """Prompts of one length, so that the peer's batch needs no padding either."""
    length, num_tokens = min(map(len, prompts)), NUM_QUICK_TOKENS if quick else NUM_TOKENS
    equal = [prompt[-length:] for prompt in prompts]
    options = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "mode": "off"}

    def batch(index: int) -> list[list[int]]:
        return [equal[(index + place) % len(equal)] for place in range(NUM_STREAMS)]

    def ours(index: int) -> float:
        return tokens_per_s(clients.run([StreamRequest(prompt, options) for prompt in batch(index)]))

    def padded(index: int) -> float:
        return NUM_STREAMS * num_tokens / peer.run_batch(batch(index), num_tokens)

    systems = {OURS: ours, BATCH: padded}
    num_pairs = NUM_QUICK_PAIRS if quick else NUM_PAIRS
    rates = take_turns(f"{NUM_STREAMS} streams", systems, range(num_pairs), [len(prompts)])
    row = partial(Row, suite=SUITE, case=f"{CASE}, {NUM_STREAMS} streams", origin=Origin(), quick=quick)
    return [ratio_row(row, rates, OURS, BATCH, required=2.0), *rate_rows(row, rates)]
