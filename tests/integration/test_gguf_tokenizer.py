"""The tokenizer that is made from a GGUF file's header has the tokens of the checkpoint that the file was written from.

The oracles are tokenizers of transformers with the checkpoint's vocabulary.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.cohere.tokenization_cohere import CohereTokenizer
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.gpt_neox.tokenization_gpt_neox import GPTNeoXTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from bench.systems.models import DEMO
from specdec.checkpoints.generation_config import recommended_sampling
from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.tokenizer import write_tokenizer
from specdec.checkpoints.vocabulary import load_tokenizer, load_vocabulary, vocabulary_fingerprint
from specdec.contract.errors import InvalidRequest, SpecdecError

DEMO_TOKENIZER = json.loads((DEMO / "target" / "tokenizer.json").read_text())
BYTE_TOKENS: dict[str, int] = DEMO_TOKENIZER["model"]["vocab"]
BYTE_MERGES: list[tuple[str, str]] = [tuple(merge) for merge in DEMO_TOKENIZER["model"]["merges"]]
SPECIAL = [token["content"] for token in DEMO_TOKENIZER["added_tokens"]]

TEXTS = [
    "", " ", "   a  b   ", "def f(x):\n    return x + 12_345  # it's DON'T we'LL\n\n\n", "x 1 12 123 1234 12345.678",
    "e\u0301 a\u0308 \u212b é", "漢字かな交じり文 한국어 Привет नमस्ते किं สวัสดี مرحبا ١٢٣ ½", "\U0001f468\u200d\U0001f469",
    "\xa0\t\r\n \u3000\x00\u200b", "HTTPServer camelCase snake_case $5.00 €10 <b>#!</b>", "<|user|>a<|eos|> <|user|>\n",
    "<s>a</s> <unk> <0x0A> \u2581\u2581 [INST] b [/INST]", "-" * 40 + " " * 40 + "x",
]  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes a file with these keys and returns the folder of its tokenizer."""

    def made(keys: Mapping[str, Any], *, architecture: str = "llama") -> Path:
        write_tokenizer(header(tmp_path / "model.gguf", keys, architecture), tmp_path)
        return tmp_path

    return made


def header(path: Path, keys: Mapping[str, Any], architecture: str = "llama", num_rows: int = 0) -> GgufFile:
    """Write a file, with an embedding if it has rows. Keys without a dot are the tokenizer's."""
    writer = GGUFWriter(path, architecture)
    adds: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if value is not None:
            adds[type(value)](key if "." in key else f"tokenizer.ggml.{key}", value)
    if num_rows:
        writer.add_tensor("token_embd.weight", np.zeros((num_rows, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def byte_level_keys(pre: str | None = "gpt-2", **others: Any) -> dict[str, Any]:
    """Return the keys of the demo model's tokenizer, with another way of splitting."""
    kinds = [int(TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL) for token in BYTE_TOKENS]
    return {
        "model": "gpt2", "pre": pre, "tokens": list(BYTE_TOKENS), "token_type": kinds,
        "merges": [" ".join(merge) for merge in BYTE_MERGES], "bos_token_id": 1, "eos_token_id": 2,
        "padding_token_id": 0, **others,
    }  # fmt: skip


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    """Tokens of a SentencePiece vocabulary, the special ones first, then bytes, then pieces by falling score."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    trained.train_from_iterator([*TEXTS, (DEMO / "README.md").read_text()], trainer)
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    rest = [token for token, _ in learned if token not in ("\u2581\u2581", "\n", "\n\n")]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581\u2581", "\n", "\n\n", *rest]


def sentencepiece_keys(tokens: Sequence[str], **others: Any) -> dict[str, Any]:
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))
    return {
        "model": "llama", "pre": "default", "tokens": list(tokens), "token_type": [int(kind) for kind in kinds],
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)], **others,
    }  # fmt: skip


def sentencepiece(tokens: Sequence[str]) -> Tokenizer:
    """Return the tokenizer as Llama 2's `tokenizer.json` has it."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    scores = dict(zip(tokens, sentencepiece_keys(tokens)["scores"], strict=True))
    oracle = Tokenizer(
        models.BPE(ids, generate_merges(ids, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    oracle.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    oracle.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    oracle.add_special_tokens(["<unk>", "<s>", "</s>"])
    return oracle


def assert_same(ours: Tokenizer, oracle: Tokenizer, texts: Sequence[str] = TEXTS) -> None:
    """Check the tokens of each text, and the texts of the tokens; BOS and EOS are compared elsewhere."""
    for text in texts:
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        for skip in (True, False):
            decoded = ours.decode(expected, skip_special_tokens=skip)
            assert decoded == oracle.decode(expected, skip_special_tokens=skip)


def read(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pre", "kind"),
    [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer), ("command-r", CohereTokenizer), ("olmo", GPTNeoXTokenizer)],
)
def test_a_byte_level_tokenizer_has_the_tokens_of_its_checkpoint(
    made: Callable[..., Path], pre: str, kind: Any
) -> None:
    names = {"unk_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    oracle = kind(vocab=BYTE_TOKENS, merges=BYTE_MERGES, **names).backend_tokenizer
    oracle.add_special_tokens(SPECIAL)
    assert_same(read(made(byte_level_keys(pre))), oracle)


def test_a_folder_is_read_like_that_of_the_checkpoint(made: Callable[..., Path]) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    directory = made(byte_level_keys(add_bos_token=True, **{"tokenizer.chat_template": template}))
    ours, own = load_tokenizer(directory), load_tokenizer(DEMO / "target")
    assert_same(ours.backend_tokenizer, own.backend_tokenizer)
    assert ours.encode("a b") == own.encode("a b")
    named = ("bos_token", "eos_token", "pad_token")
    assert [ours.special_tokens_map[name] for name in named] == [own.special_tokens_map[name] for name in named]
    assert ours.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|bos|>a"
    assert vocabulary_fingerprint(ours.get_vocab()) == vocabulary_fingerprint(load_vocabulary(DEMO / "target"))


def test_a_piece_that_is_a_token_needs_no_merges_if_the_checkpoint_ignores_them(made: Callable[..., Path]) -> None:
    tokens = [*BYTE_TOKENS, "Ġqzx"]
    keys = byte_level_keys(tokens=tokens, token_type=[1] * len(tokens), pre="llama-bpe")
    assert read(made(keys)).encode(" qzx").ids == [1, len(tokens) - 1]
    keys["pre"] = "dbrx"
    assert len(read(made(keys)).encode(" qzx").ids) > 1


def test_marked_tokens_are_found_whole_and_placeholders_are_no_tokens(made: Callable[..., Path]) -> None:
    """Marked tokens are spelled as they are, and not in the byte-level alphabet."""
    num, begin = len(BYTE_TOKENS), "<｜begin▁of▁sentence｜>"
    tokens = [*BYTE_TOKENS, "   ", begin, "été", "[PAD2051]", "[PAD7]", "[PAD3]"]
    kinds = [int(TokenType.NORMAL)] * num + [4, 3, 4, 4, 5, 1]
    directory = made(byte_level_keys(tokens=tokens, token_type=kinds, bos_token_id=num + 1, add_bos_token=True))
    ours = load_tokenizer(directory)
    assert ours.encode(f"   été{begin}") == [num + 1, num, num + 2, num + 1]
    assert ours.decode([num + 1, num]) == f"{begin}   "
    assert ours.decode([num + 1, num], skip_special_tokens=True) == "   "
    assert {*ours.get_vocab()} == {*tokens} - {"[PAD2051]", "[PAD7]"}


def test_a_sentencepiece_tokenizer_has_the_tokens_of_its_checkpoint(
    made: Callable[..., Path], pieces: list[str]
) -> None:
    ours, oracle = read(made(sentencepiece_keys(pieces))), sentencepiece(pieces)
    assert_same(ours, oracle)
    assert ours.encode("a").ids[0] == 1

    oracle.normalizer = normalizers.Replace(" ", "\u2581")
    oracle.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert_same(read(made(sentencepiece_keys(pieces, add_space_prefix=False))), oracle)


def test_instruction_tokens_have_no_space_behind_them(made: Callable[..., Path], pieces: list[str]) -> None:
    """Mistral's later tokenizers put a space before the whole text only."""
    tokens = [*pieces, "[INST]"]
    keys = sentencepiece_keys(tokens)
    keys["token_type"][-1] = int(TokenType.CONTROL)
    oracle = sentencepiece(tokens)
    oracle.add_special_tokens(["[INST]"])
    oracle.normalizer = None
    oracle.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    assert_same(read(made(keys)), oracle)


def test_the_marks_of_phi_3_swallow_the_space_behind_them(made: Callable[..., Path], pieces: list[str]) -> None:
    tokens = [*pieces, "<|user|>", "<|endoftext|>"]
    keys = sentencepiece_keys(tokens)
    keys["token_type"][-2:] = [int(TokenType.CONTROL)] * 2
    ours = read(made(keys, architecture="phi3"))
    bare = ours.encode("<|user|>a").ids
    assert ours.encode("<|user|>\n a").ids == bare
    assert ours.encode("<|endoftext|>\n a").ids != ours.encode("<|endoftext|>a").ids


def test_gemma_s_tokens_of_spaces_are_made_by_merges(made: Callable[..., Path], pieces: list[str]) -> None:
    stored = ["  " if token == "\u2581\u2581" else token for token in pieces]
    keys = sentencepiece_keys(stored, bos_token_id=1)
    for token in ("  ", "\n", "\n\n"):
        keys["token_type"][stored.index(token)] = int(TokenType.USER_DEFINED)
    ids = {token: token_id for token_id, token in enumerate(pieces)}
    merges = generate_merges(ids, {token: -token_id for token, token_id in ids.items()})
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "mask_token": "<unk>"}
    oracle = GemmaTokenizer(vocab=ids, merges=merges, **names).backend_tokenizer
    oracle.add_special_tokens(["<unk>", "<s>", "</s>"])
    oracle.add_tokens(["\n", "\n\n"])
    ours = read(made(keys, architecture="gemma3"))
    assert_same(ours, oracle)
    assert ours.encode("a").ids[0] == 1

    keys = sentencepiece_keys(pieces, model="gemma4", merges=[" ".join(merge) for merge in merges], add_bos_token=True)
    later = read(made(keys, architecture="gemma4"))
    assert_same(later, oracle, [text for text in TEXTS if "\n" not in text])
    assert later.encode("a").ids[0] != 1


@pytest.mark.parametrize(
    ("keys", "around"),
    [({}, [[], []]), ({"add_bos_token": True, "add_eos_token": True}, [[1], [2]]), ({"pre": "tekken"}, [[1], []]),
     ({"pre": "tekken", "add_bos_token": False}, [[], []])],
)  # fmt: skip
def test_the_tokens_around_a_text_are_those_that_the_file_names(
    made: Callable[..., Path], keys: dict[str, Any], around: list[list[int]]
) -> None:
    ours = read(made(byte_level_keys(**keys)))
    bare = ours.encode("a", add_special_tokens=False).ids
    assert ours.encode("a").ids == [*around[0], *bare, *around[1]]


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        (["<|im_end|>"], {"tokenizer.chat_template": "…<|im_end|>"}, [2, 2048]),
        (["<|im_end|>"], {}, [2]),
        (["<|im_end|>"], {"eot_token_id": 2048, "eom_token_id": 5}, [2, 2048, 5]),
        (["<turn|>", "<|tool_response>"], {"tokenizer.chat_template": "<turn|><|tool_response>"}, [2, 2048, 2049]),
        (["<|end|>"], {"tokenizer.chat_template": "<|end|>"}, [2, 2048]),
        (["<|end|>", "<|return|>"], {"tokenizer.chat_template": "<|end|><|return|>"}, [2, 2049]),
    ],
)
def test_an_answer_ends_with_the_tokens_that_the_file_and_its_template_name(
    made: Callable[..., Path], tokens: list[str], keys: dict[str, Any], ends: list[int]
) -> None:
    directory = made(byte_level_keys(tokens=[*BYTE_TOKENS, *tokens], token_type=None, **keys))
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": ends}


def test_the_sampling_that_a_checkpoint_recommends_is_kept(made: Callable[..., Path]) -> None:
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05, "mirostat": 2}
    directory = made(byte_level_keys() | {f"general.sampling.{key}": value for key, value in sampling.items()})
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert recommended_sampling(directory) == recommended


@pytest.mark.parametrize("pre", ["a-way-of-next-year", None])
def test_a_way_of_splitting_that_is_not_known_is_warned_of(
    made: Callable[..., Path], caplog: pytest.LogCaptureFixture, pre: str | None
) -> None:
    ours = read(made(byte_level_keys(pre)))
    assert ours.encode("x 123").ids == read(made(byte_level_keys())).encode("x 123").ids
    [warning] = [record.getMessage() for record in caplog.records]
    assert "model.gguf" in warning
    assert ("'a-way-of-next-year'" if pre else "does not say") in warning
    assert warning.endswith("using GPT-2's rules")


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "t5"}, "has tokenizer.ggml.model 't5'; gpt2, llama and gemma4 are supported"),
    ({"model": None}, "has tokenizer.ggml.model None"),
    ({"pre": "mmbert"}, "has tokenizer.ggml.pre 'mmbert', which is not supported"),
    ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is no list of strings"),
    ({"tokens": ["a" * 4097, "b"]}, "tokenizer.ggml.tokens[0] has 4097 characters, and a token has at most 4096"),
    ({"pre": [1]}, "tokenizer.ggml.pre is no text"),
    ({"merges": None}, "tokenizer.ggml.merges is missing"),
    ({"merges": ["Ġ Ġ", "Ġ"]}, "tokenizer.ggml.merges[1] is 'Ġ'"),
    ({"merges": ["z q"]}, "tokenizer.ggml.merges[0] is 'z q', which must be two of tokenizer.ggml.tokens"),
    ({"tokens": [*[*BYTE_TOKENS][:-1], "!"]}, "tokenizer.ggml.tokens has '!' twice: as 6 and as 2047"),
    ({"token_type": [1, 1]}, "token_type has 2 numbers, and tokenizer.ggml.tokens has 2048 tokens"),
    ({"token_type": "normal"}, "token_type has no list of numbers"),
    ({"eos_token_id": 2048}, "tokenizer.ggml.eos_token_id is 2048, which is the id of no token"),
    ({"eot_token_id": "2"}, "tokenizer.ggml.eot_token_id is '2'"),
    ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1 instead of true or false"),
    ({"add_bos_token": True, "bos_token_id": None}, "tokenizer.ggml.bos_token_id is missing"),
    ({"tokenizer.chat_template": True}, "tokenizer.chat_template is no text"),
    ({"model": "llama", "merges": None}, "tokenizer.ggml.scores is missing"),
]


@pytest.mark.parametrize(("fault", "told"), FAULTS)
def test_a_header_that_contradicts_itself_is_refused_with_its_key(
    made: Callable[..., Path], tmp_path: Path, fault: dict[str, Any], told: str
) -> None:
    with pytest.raises(SpecdecError) as refusal:
        made(byte_level_keys() | fault)
    assert told in refusal.value.message
    assert refusal.value.message.startswith(f"model {str(tmp_path / 'model.gguf')!r}")
    assert "\n" not in refusal.value.message
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


def test_more_tokens_than_rows_of_the_embedding_are_refused(tmp_path: Path) -> None:
    write_tokenizer(header(tmp_path / "model.gguf", byte_level_keys(), num_rows=2048), tmp_path)
    file = header(tmp_path / "model.gguf", byte_level_keys(), num_rows=3)
    with pytest.raises(InvalidRequest, match=r"2048 tokens, and token_embd\.weight has 3 rows"):
        write_tokenizer(file, tmp_path)


def test_a_padding_token_beyond_the_vocabulary_is_ignored_with_a_warning(
    made: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert "pad_token" not in load_tokenizer(made(byte_level_keys(padding_token_id=4096))).special_tokens_map
    assert "tokenizer.ggml.padding_token_id is 4096" in caplog.text


def test_no_other_library_is_loaded(tmp_path: Path) -> None:
    header(tmp_path / "model.gguf", byte_level_keys())
    program = (
        "import sys\nfrom pathlib import Path\nfrom specdec.checkpoints.gguf.file import GgufFile\n"
        "from specdec.checkpoints.gguf.tokenizer import write_tokenizer\n"
        f"folder = Path({str(tmp_path)!r})\nwrite_tokenizer(GgufFile(folder / 'model.gguf'), folder)\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'gguf') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
