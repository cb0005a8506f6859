"""A model on two ranks against the same model in one process: logits, greedy and sampled text, and each rank's part."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bench.systems.models import DEMO
from specdec.checkpoints.vocabulary import load_vocabulary
from specdec.contract.errors import InvalidRequest, SpecdecError, Unsupported
from specdec.contract.types import BLOCK_TOKENS, SamplingFilters
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.logits.filters import filtered_distributions
from specdec.engine.logits.penalties import FilterContext
from specdec.engine.logits.rows import coupled_choices
from specdec.engine.options import EAGER, CompileOptions, LoadRequest
from tests.support.gguf_models import CASES as CASES_OF_GGUF
from tests.support.gguf_models import build, write_case
from tests.support.rank_rig import RankRig
from tests.support.tiny_models import build_tiny_model

VOCABULARY_SIZE = 96
NUM_BLOCKS = 320
NUM_TEXTS, NUM_TOKENS = 20, 64
#: Two logits that differ by less are a tie, which rounding may decide either way.
TIE = 1e-4
#: Largest share of the parameters that a rank may hold.
MOST = 0.6

#: Of the last: biases everywhere, one matrix for embedding and head, and widths that do not divide by two.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma3": ("gemma3", {}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "uneven": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "intermediate_size": 113,
         "vocab_size": VOCABULARY_SIZE + 3},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankRig]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with RankRig(2) as rig:
            yield rig
    torch.set_num_threads(threads)


class Case:
    """One model in one process and on two ranks."""

    def __init__(self, name: str, directory: Path, rig: RankRig) -> None:
        architecture, overrides = CASES[name]
        self.name = name
        self.directory = build_tiny_model(
            architecture,
            directory,
            vocabulary_size=VOCABULARY_SIZE,
            context=1024,
            gain=1.0,
            logit_spread=1.0,
            config_overrides=overrides,
        )
        self.divided = rig.load(self.directory, num_kv_blocks=NUM_BLOCKS)
        self.shares = rig.shares
        self.alone = load_worker(
            LoadRequest(
                str(self.directory),
                device="cpu",
                dtype="float32",
                num_kv_blocks=NUM_BLOCKS,
                compiling=CompileOptions(EAGER),
            )
        )


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rig: RankRig) -> Iterator[Case]:
    case = Case(request.param, tmp_path_factory.mktemp("model"), rig)
    yield case
    case.divided.close()


def tables(count: int) -> list[tuple[int, ...]]:
    """Return block tables of a number of sequences, in random order."""
    ids = list(range(NUM_BLOCKS))
    random.Random(7).shuffle(ids)
    each = NUM_BLOCKS // count
    return [tuple(ids[index * each : (index + 1) * each]) for index in range(count)]


def piece(tokens: Sequence[int], start: int, end: int, table: tuple[int, ...], rows: int) -> SequenceSlice:
    return SequenceSlice(tuple(tokens[start:end]), start, table[: -(-end // BLOCK_TOKENS)], rows)


def random_tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY_SIZE) for _ in range(length)]


def test_logits_of_two_ranks_equal_those_of_one_process_and_of_transformers(case: Case) -> None:
    """Run a prefill with a plan that needs a second broadcast, then ragged steps with a copied block."""
    sequences = [random_tokens(index, length) for index, length in enumerate((700, 400, 90))]
    own = tables(len(sequences))
    plans = [
        StepPlan(
            tuple(piece(tokens, 0, len(tokens) - 9, table, 3) for tokens, table in zip(sequences, own, strict=True))
        )
    ]
    for back in (9, 8, 5):
        ahead = {9: 1, 8: 3, 5: 5}[back]
        plans.append(
            StepPlan(
                tuple(
                    piece(tokens, len(tokens) - back, len(tokens) - back + ahead, table, ahead)
                    for tokens, table in zip(sequences, own, strict=True)
                )
            )
        )
    # A branch starts with a copy of the last sequence's partial block and runs its last token again.
    last, table = sequences[-1], own[-1]
    partial_block = (len(last) - 1) // BLOCK_TOKENS
    branch = (*table[:partial_block], own[0][-1])
    plans.append(StepPlan((piece(last, len(last) - 1, len(last), branch, 1),), ((table[partial_block], branch[-1]),)))
    eager = AutoModelForCausalLM.from_pretrained(case.directory, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = [eager(torch.tensor([tokens])).logits[0, :, :VOCABULARY_SIZE] for tokens in sequences]
    for plan in plans:
        divided, alone = case.divided.execute(plan), case.alone.execute(plan)
        assert divided.shape == alone.shape
        torch.testing.assert_close(divided, alone, rtol=0, atol=1e-4)
    # The rows of all but the first plan are the sequences' last ones.
    torch.testing.assert_close(divided[-1], expected[-1][-1], rtol=0, atol=1e-4)
    torch.testing.assert_close(divided[-1], case.divided.execute(plans[-2])[-1], rtol=0, atol=1e-5)


def generate(worker: Worker) -> tuple[list[list[int]], list[torch.Tensor]]:
    """`NUM_TOKENS` tokens each of `NUM_TEXTS` greedy texts and as many seeded samples, all in the same steps, and the
    logits that each step chose from.
    """
    sequences = [random_tokens(index, 5 + index % NUM_TEXTS) for index in range(2 * NUM_TEXTS)]
    own = tables(len(sequences))
    starts, seen = [0] * len(sequences), []
    for _ in range(NUM_TOKENS):
        parts = zip(sequences, starts, own, strict=True)
        logits = worker.execute(
            StepPlan(tuple(piece(tokens, start, len(tokens), table, 1) for tokens, start, table in parts))
        )
        seen.append(logits)
        starts = [len(tokens) for tokens in sequences]
        chosen = logits[:NUM_TEXTS].argmax(dim=-1).tolist() + sampled(logits[NUM_TEXTS:], sequences[NUM_TEXTS:])
        for tokens, token_id in zip(sequences, chosen, strict=True):
            tokens.append(token_id)
    return sequences, seen


def sampled(logits: torch.Tensor, sequences: Sequence[Sequence[int]]) -> list[int]:
    filters = SamplingFilters(temperature=0.8, top_p=0.9)
    distributions = filtered_distributions(logits, [FilterContext(filters, tokens, 5) for tokens in sequences])
    positions = [len(tokens) for tokens in sequences]
    return coupled_choices(distributions, range(len(sequences)), [1] * len(sequences), positions)[0]


def test_twenty_greedy_and_twenty_seeded_texts_are_the_same_on_two_ranks_except_for_ties(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    divided, seen = generate(case.divided)
    alone, _ = generate(case.alone)
    for index, (ours, theirs) in enumerate(zip(divided, alone, strict=True)):
        if ours == theirs:
            continue
        assert index < NUM_TEXTS, "a seeded sample differs"
        step = next(at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]) - (5 + index)
        best, second = seen[step][index].topk(2).values.tolist()
        with capsys.disabled():
            print(f"\n{case.name}, text {index}: a tie after {step} tokens, {best - second:.1e} apart")
        assert best - second < TIE


def test_each_rank_reads_and_holds_only_its_part(case: Case) -> None:
    for share in case.shares:
        assert share["parameter_share"] <= MOST
        assert share["kv_share"] <= MOST or case.name == "one KV head"  # a head cannot be divided
        assert case.name == "gemma3" or share["share_read"] <= MOST  # transformers reads its own


def test_a_divided_model_has_the_fingerprint_of_the_whole(case: Case) -> None:
    whole, part = case.alone.shape.kv_layout, case.divided.shape.kv_layout
    assert case.divided.shape == replace(case.alone.shape, kv_layout=part)
    # Blocks of which pass between replicas as their rank's only.
    assert part == replace(part, dtype=whole.dtype, rank="tp2.0")
    assert len(part.layer_bytes) == len(whole.layer_bytes)


def own_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add a head that differs from the embedding."""
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].flip(0).contiguous()}


def equal_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}


def head_alone(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("model.embed_tokens", "lm_head"): weight for name, weight in weights.items()}


def without_prefix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): weight for name, weight in own_head(weights).items()}


def prefix_everywhere(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"model.{name.removeprefix('model.')}": weight for name, weight in own_head(weights).items()}


def logits_of_ranks(rig: RankRig, directory: Path, tokens: Sequence[int], **fields: Any) -> torch.Tensor:
    worker = rig.load(directory, num_kv_blocks=16, **fields)
    return worker.execute(StepPlan((piece(tokens, 0, len(tokens), tuple(range(8)), 4),)))


def logits_of_transformers(directory: Path, tokens: Sequence[int], dtype: Any = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -4:, :VOCABULARY_SIZE].float()
    return logits


@pytest.mark.parametrize("change", [own_head, equal_head, head_alone, without_prefix, prefix_everywhere])
@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen2", marks=pytest.mark.full), "gemma3"])
def test_ranks_serve_the_weights_that_transformers_loads_if_files_and_configuration_disagree(
    architecture: str, change: Callable[..., dict[str, torch.Tensor]], rig: RankRig, tmp_path: Path
) -> None:
    """The configuration says that embedding and head are one matrix; the file says otherwise, or has other names."""
    build_tiny_model(architecture, tmp_path, vocabulary_size=VOCABULARY_SIZE,
                     config_overrides={"tie_word_embeddings": True, "vocab_size": VOCABULARY_SIZE + 3})  # fmt: skip
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    tokens = random_tokens(1, 40)
    expected = logits_of_transformers(tmp_path, tokens)
    torch.testing.assert_close(logits_of_ranks(rig, tmp_path, tokens), expected, rtol=0, atol=1e-4)


def test_ranks_read_the_files_that_transformers_reads(rig: RankRig, tmp_path: Path) -> None:
    """A directory may hold files of an earlier, divided checkpoint beside the whole one."""
    older = build_tiny_model("llama", tmp_path / "older", vocabulary_size=VOCABULARY_SIZE, seed=1)
    newer = build_tiny_model("llama", tmp_path / "newer", vocabulary_size=VOCABULARY_SIZE, seed=2)
    weights = load_file(older / "model.safetensors")
    save_file(weights, newer / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (newer / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = random_tokens(1, 40)
    expected = logits_of_transformers(newer, tokens)
    torch.testing.assert_close(logits_of_ranks(rig, newer, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama with biases", "gemma3"])
def test_ranks_serve_a_gguf_file(name: str, rig: RankRig, tmp_path: Path) -> None:
    kind, changes, architecture, numbers = CASES_OF_GGUF[name]
    changes = {**changes, "vocab_size": len(load_vocabulary(DEMO / "target"))}
    path = write_case((kind, changes, architecture, numbers), tmp_path / "a.gguf", tokenizer=DEMO / "target")
    tokens = random_tokens(1, 40)
    with torch.no_grad():
        expected = build(kind, changes)(torch.tensor([tokens])).logits[0, -4:]
    torch.testing.assert_close(logits_of_ranks(rig, path, tokens), expected, rtol=0, atol=1e-4)
    assert max(share["parameter_share"] for share in rig.shares) < MOST


def test_ranks_and_one_process_refuse_missing_and_misshapen_weights(rig: RankRig, tmp_path: Path) -> None:
    directory = build_tiny_model("llama", tmp_path, vocabulary_size=VOCABULARY_SIZE)
    path = directory / "model.safetensors"
    weights = load_file(path)
    short = weights["lm_head.weight"][1:].contiguous()
    for altered, words in (
        ({k: v for k, v in weights.items() if k != "lm_head.weight"}, "lacks the weight lm_head.weight (1 in all)"),
        (weights | {"lm_head.weight": short}, "tensor lm_head.weight has shape [95, 64], and its configuration needs"),
    ):
        save_file(altered, path, {"format": "pt"})
        with pytest.raises(InvalidRequest) as of_ranks:
            rig.load(directory)
        with pytest.raises(InvalidRequest) as of_one:
            load_worker(LoadRequest(str(directory), device="cpu", dtype="float32", num_kv_blocks=8))
        assert of_ranks.value.message == of_one.value.message
        assert words in of_ranks.value.message


def test_all_ranks_refuse_a_model_that_cannot_be_divided(rig: RankRig, tmp_path: Path) -> None:
    def refusal(architecture: str, overrides: dict[str, Any] | None = None, **fields: Any) -> SpecdecError:
        directory = build_tiny_model(
            architecture, tmp_path / f"{architecture}{len(fields)}", config_overrides=overrides
        )
        with pytest.raises(SpecdecError) as caught:
            rig.load(directory, **fields)
        return caught.value

    assert isinstance(error := refusal("gpt2"), Unsupported)
    assert error.message == "--tensor-parallel: transformers cannot divide a model of type gpt2"
    assert isinstance(error := refusal("gemma3", {"num_key_value_heads": 1}), InvalidRequest)
    assert error.message.startswith("--tensor-parallel 2 does not divide the model's 1 KV heads, and ranks of a model")
    error = refusal("llama", {"num_attention_heads": 1, "num_key_value_heads": 1})
    assert error.message == "--tensor-parallel 2 does not divide the model's 1 attention heads"
    for options, words in (
        ({"backend": "native"}, "--compile-backend auto, eager or cuda-graphs, not native"),
        ({"backend": "cuda-graphs"}, "--tensor-parallel with --compile-backend cuda-graphs needs GPUs"),
        ({"is_deterministic": True}, "--tensor-parallel supports --deterministic on GPUs only"),
    ):
        assert words in refusal("llama", compiling=options).message
    assert "--tensor-parallel supports int8 weights on GPUs only" in refusal("llama", dtype="int8").message
    assert "no room for one block" in refusal("llama", kv_cache_bytes=1).message
