"""Writes the checkpoint of a GGUF file as Hugging Face keeps them: a program, run as a child by
`specdec.checkpoints.gguf`.

`python -m specdec.checkpoints.gguf_convert FILE DIRECTORY [--tokenizer-only]`. What a file means is transformers'
knowledge; here is what it leaves to its caller: whether the file was read whole, which tokens end an answer, how this
vocabulary's merges see digits, and in which dtype the weights can be kept without rounding one. Each line of standard
output is a JSON object with a `warning`, or with the `error` or `unsupported` that it ends with. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.integrations.gguf.reader import read_gguf_metadata

from specdec.checkpoints.gguf_rope import DIVISORS, is_readable

_LINK = "model.gguf"

#: Byte-level vocabularies whose merges were learned with every digit alone, by what files call them.
#: Source: llama.cpp, `llama_vocab::impl::tokenize` (LLAMA_VOCAB_PRE_TYPE_SMOLLM and those beside it).
_SINGLE_DIGITS = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"}
#: Those that GPT-2's splitting, which transformers takes for every name it does not know, is right for.
_LIKE_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "jina-es", "jina-de", "gigachat",
              "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert", "jina-v1-en", "jina-v2-code",
              "roberta-bpe"}  # fmt: skip

#: Tokens that end a turn where the file's own chat template writes them, whatever it calls its end of sequence.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_HALF_DTYPES = (torch.bfloat16, torch.float16)


class NotConverted(Exception):
    """It is read wrongly or not at all by transformers; the message goes on after the file's name."""


def main() -> int:
    """Converts what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer-only", action="store_true")
    asked = parser.parse_args()
    try:
        convert(asked.file, asked.directory, tokenizer_only=asked.tokenizer_only)
    except NotConverted as error:
        _say("unsupported", str(error))
        return 1
    except OSError as error:
        _say("error", f"cannot be converted: {error.strerror or error}")
        return 1
    # A damaged file raises whatever its bytes happen to look like.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
        _say("error", f"cannot be read: {reason[:300]}")
        return 1
    return 0


def convert(path: Path, directory: Path, *, tokenizer_only: bool) -> None:
    """Writes a directory that `specdec.checkpoints.locate` takes for a model, or for its tokenizer alone.

    Raises:
        NotConverted: transformers does not read this model, or not all of it.
        Exception: whatever a damaged file makes its readers raise.
    """
    metadata, _ = read_gguf_metadata(str(path), ("tokenizer.ggml.tokens",))
    # By itself: transformers also reads what lies beside a file.
    with tempfile.TemporaryDirectory(prefix="specdec-gguf-") as folder:
        (Path(folder) / _LINK).symlink_to(path)
        tokenizer = _load_tokenizer(folder, metadata)
        tokenizer.save_pretrained(directory)
        _drop_made_up_tokens(directory / "tokenizer.json", len(metadata["tokenizer.ggml.tokens"]))
        if not tokenizer_only:
            _save_model(folder, directory, metadata, tokenizer)


def _load_tokenizer(folder: str, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    # Not AutoTokenizer: for Gemma's quarter of a million tokens it takes eight times as long, to the same end.
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
        folder, gguf_file=_LINK, local_files_only=True, trust_remote_code=False
    )
    splitter = str(metadata.get("tokenizer.ggml.pre", "default"))
    if metadata.get("tokenizer.ggml.model") != "gpt2" or splitter in ("default", *_LIKE_GPT2):
        return tokenizer
    if splitter in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif splitter not in gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS:
        _say(
            "warning",
            f"its tokenizer splits text as {splitter!r}, which transformers does not know; using GPT-2's rules",
        )
    return tokenizer


def _drop_made_up_tokens(path: Path, num_tokens: int) -> None:
    """Takes out what the tokenizer's class added by default: the model has no row for it."""
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < num_tokens]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")


def _save_model(folder: str, directory: Path, metadata: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    if metadata.get("split.count", 1) > 1:
        raise NotConverted("is one part of a split model: join the parts with llama-gguf-split --merge")
    file = GGUFReader(f"{folder}/{_LINK}")
    scaling = next((tensor.data for tensor in file.tensors if tensor.name == DIVISORS), None)
    try:
        # Made once: transformers parses the whole file, vocabulary and all, whenever it needs a configuration.
        config = AutoConfig.from_pretrained(folder, gguf_file=_LINK, trust_remote_code=False)
        if not is_readable(config, metadata, scaling):
            raise NotConverted("uses an unsupported RoPE scaling")
        model, report = cast(tuple[PreTrainedModel, dict[str, Any]], AutoModelForCausalLM.from_pretrained(
            folder, config=config, gguf_file=_LINK, dtype=torch.float32, output_loading_info=True,
            trust_remote_code=False,
        ))  # fmt: skip
    except ValueError as error:
        if "not supported" in str(error) or "Unrecognized" in str(error):
            raise NotConverted(f"holds a model of an unsupported type: {_architecture(metadata)}") from error
        raise
    _require_whole(file, model, report)
    end_token_ids = _end_token_ids(metadata, tokenizer)
    model.generation_config.eos_token_id = model.config.eos_token_id = end_token_ids or None
    # What says that the weights were quantised once: with it, a model cannot be saved.
    del model.hf_quantizer, model.config.quantization_config
    dtype = exact_dtype(model.state_dict().values())
    # The decorator that transformers puts on `to` loses `self`.
    model.to(dtype).save_pretrained(directory)  # type: ignore[arg-type]


def _require_whole(file: GGUFReader, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raises NotConverted unless every number of the file went into the model, and none of the model's is made up."""
    if report["missing_keys"]:
        raise NotConverted(f"lacks weights, {min(report['missing_keys'])} for one")
    in_file = sum(int(tensor.n_elements) for tensor in file.tensors if tensor.name != DIVISORS)
    in_model = sum(parameter.numel() for parameter in model.parameters())  # tied ones count once, as in the file
    if in_file != in_model:
        raise NotConverted(
            f"holds {in_file} weights, of which transformers reads {in_model}: converted to type "
            f"{model.config.model_type}, it would be a different model"
        )


def _architecture(metadata: dict[str, Any]) -> str:
    return str(metadata["general.architecture"])


def _end_token_ids(metadata: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    template, vocabulary = tokenizer.chat_template or "", tokenizer.get_vocab()
    written = [vocabulary.get(token) for token in _TURN_ENDS if token in template]
    return list(dict.fromkeys(token_id for token_id in [*named, *written] if token_id is not None))


def exact_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The narrowest dtype that keeps every value of these float32 tensors."""
    left = list(_HALF_DTYPES)
    for tensor in tensors:
        left = [dtype for dtype in left if torch.equal(tensor.to(dtype).float(), tensor)]
        if not left:
            break
    return (*left, torch.float32)[0]


def _say(kind: str, text: str) -> None:
    print(json.dumps({kind: text}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
