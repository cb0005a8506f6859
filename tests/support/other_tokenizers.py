"""Tokenizers that agree on no spelling, trained here or written by hand, and a model's copy that speaks another one.

Byte-level BPE spells " é" as `ĠÃ©`, SentencePiece's BPE as `▁é`, with byte tokens such as `<0xC3>` for what it has not
seen. Not fixtures: each call writes one directory. Called by tests of drafts with a tokenizer of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair, make_pair
from specdec.checkpoints.token_bytes import byte_level_spelling
from specdec.checkpoints.vocabulary import load_tokenizer
from tests.support.tiny_models import build_tiny_model


def load_pair(draft: str | Path, target: str | Path) -> TokenizerPair:
    """Read both tokenizers, each from a checkpoint directory that may hold tokenizer files alone."""
    return make_pair((str(draft), load_tokenizer(draft)), (str(target), load_tokenizer(target)))


CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Die Bären gehen über die Brücke; für größere Bären ist sie zu schmal.",
    "Le café fermé était déjà près de l'hôtel, à côté du théâtre.",
    "def größe(wert: int) -> int:\n    return wert + 1\n\n\nfor i in range(10):\n    print(größe(i))\n",
    "今天天气很好,我们去公园散步吧。今天天气很好。",
    "Smile 🌲🌲 and wave 👍🏽, then smile again 🌲.",
] * 3

#: Not in the corpus, and with characters that none of the tokenizers has a token for.
TEXTS = [
    "The lazy fox über the café.",
    "Žluťoučký kůň 🌲👩‍👩‍👧 fährt\n\n    zur Brücke,  今天 🐎!",
    "for i in range(10):\n    print(größe(i))\n\treturn i",
    "Ω≈ç√∫˜µ≤≥÷ \u200b\u0301x",
]

#: Of one, two, three and four bytes.
CHARACTERS = "abcdefghijklmno \n" + "éüß" + "今天" + "🌲"

_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
_SPECIAL = ["<unk>", "</s>", "<s>"]


def save_byte_level(directory: Path, *, size: int = 500, corpus: Sequence[str] = CORPUS) -> Path:
    """Trains byte-level BPE, as GPT-2's; it has no token that begins a sequence."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(corpus, trainer)
    backend.decoder = decoders.ByteLevel()
    return _save(backend, directory, eos_token="<|end|>", pad_token="<pad>")


def save_pieces(directory: Path, *, size: int = 600, corpus: Sequence[str] = CORPUS) -> Path:
    """Trains BPE as SentencePiece's: `▁` for blanks, one before the text, byte fallback, a token that begins."""
    trained = Tokenizer(BPE())
    trained.normalizer, trained.pre_tokenizer = _piece_normalizer(), pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(corpus, BpeTrainer(vocab_size=size - 259, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = [*_SPECIAL, *_BYTE_TOKENS, *model["vocab"]]
    merges = [tuple(merge) for merge in model["merges"]]
    return save_piece_vocabulary(directory, tokens, merges, begins=True)


def save_piece_vocabulary(
    directory: Path, tokens: Sequence[str], merges: Sequence[tuple[str, str]], *, begins: bool = False
) -> Path:
    """SentencePiece's BPE of given tokens, `</s>` among them; with `begins`, `<s>` and a blank open a text."""
    ids = {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}
    unknown = {"unk_token": "<unk>"} if "<unk>" in ids else {}
    backend = Tokenizer(BPE(ids, list(merges), fuse_unk=True, byte_fallback=True, **unknown))
    backend.normalizer = _piece_normalizer() if begins else normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if begins:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    return _save(backend, directory, eos_token="</s>", **unknown, **({"bos_token": "<s>"} if begins else {}))


def save_byte_level_vocabulary(
    directory: Path, tokens: Sequence[str], merges: Sequence[tuple[str, str]], **special_tokens: str
) -> Path:
    """Byte-level BPE of given tokens, `<|end|>` among them; `special_tokens` are others, by their roles."""
    backend = Tokenizer(BPE({token: token_id for token_id, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _save(backend, directory, eos_token="<|end|>", **special_tokens)


def save_characters(directory: Path, characters: str = CHARACTERS, *, in_bytes: bool) -> Path:
    """A token a character, spelled one way or the other: every text has one tokenisation, in either."""
    if not in_bytes:
        return save_piece_vocabulary(directory, ["▁", "</s>", *characters.replace(" ", "")], [])
    tokens, merges = ["<|end|>"], []
    for character in reversed(characters):
        *spelled, last = (byte_level_spelling(bytes([byte])) for byte in character.encode())
        tokens += [*spelled, last]
        built = "".join(spelled[:1])
        for part in [*spelled[1:], last] if spelled else ():
            merges.append((built, part))
            built += part
            tokens.append(built)
    return save_byte_level_vocabulary(directory, list(dict.fromkeys(tokens)), list(dict.fromkeys(merges)))


def build_model(tokenizer: Path, directory: Path, **options: object) -> Path:
    """A tiny random model that speaks a tokenizer's tokens; `options` as `build_tiny_model`'s."""
    served = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    build_tiny_model("llama", directory, vocabulary_size=len(served), eos_token_ids=(served.eos_token_id,), **options)  # type: ignore[arg-type]
    served.save_pretrained(directory)
    return directory


def build_cross_vocabulary_copy(target: Path, tokenizer: Path, directory: Path) -> Path:
    """The target's own weights for tokens of another tokenizer: where text is the same, so is what it says.

    Rows of tokens in common are the target's; no other token is likely.
    """
    build_model(tokenizer, directory)
    pair = load_pair(directory, target)
    target_of = torch.from_numpy(pair.tokens.target_of)
    shared = target_of >= 0
    theirs, ours = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (target, directory))
    with torch.no_grad():
        tables = ("model.embed_tokens.weight", "lm_head.weight")
        weights = ours.state_dict()
        for name, values in theirs.state_dict().items():
            if name in tables:
                weights[name][shared] = values[target_of[shared]]
                if name == "lm_head.weight":
                    weights[name][~shared] = 0.0
            else:
                weights[name].copy_(values)
    ours.save_pretrained(directory)
    return directory


def _piece_normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _save(backend: Tokenizer, directory: Path, **roles: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(directory)
    return directory
