"""Convert a GGUF file to a Hugging Face checkpoint. `specdec.checkpoints.gguf.conversion` runs this program as a child.

`python -m specdec.checkpoints.gguf_convert FILE DIRECTORY [--tokenizer-only]`. transformers reads the file. This module
does what transformers leaves to its caller: it checks that the whole file was read, sets the numbers that transformers
leaves out (`gguf_numbers`), finds the tokens that end an answer, splits digits as the vocabulary's merges expect, and
chooses a dtype that stores every weight without rounding. Each line of standard output is a JSON object with the
`progress`, a share of 1, with a `warning`, or with the final `error` or `unsupported`. The program downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from gguf import GGUFReader
from tokenizers import decoders, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.utils.logging import set_tqdm_hook

from specdec.checkpoints.gguf_numbers import DIVISORS, NotConverted, require_equal_layers, settle
from specdec.checkpoints.vocabulary import continuing_tokenizer

_LINK = "model.gguf"

#: `tokenizer.ggml.pre` of byte-level vocabularies whose merges were learned with every digit as a separate piece.
#: Source: llama.cpp, `llama_vocab::impl::tokenize` (LLAMA_VOCAB_PRE_TYPE_SMOLLM and its neighbours).
_SINGLE_DIGITS = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"}
#: Names for which GPT-2's splitting is right. transformers uses that splitting for every name it does not know.
_LIKE_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "jina-es", "jina-de", "gigachat",
              "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert", "jina-v1-en", "jina-v2-code",
              "roberta-bpe"}  # fmt: skip

#: Tokens that end a turn if the file's chat template contains them, in addition to its end-of-sequence token.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

#: Shares of a conversion that are done once the tokenizer is written, and once the weights are loaded.
_TOKENIZER_SHARE, _LOADED_SHARE = 0.1, 0.8

_HALF_DTYPES = (torch.bfloat16, torch.float16)


def main() -> int:
    """Convert the file that the command line names and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer-only", action="store_true")
    args = parser.parse_args()
    try:
        convert(args.file, args.directory, tokenizer_only=args.tokenizer_only)
    except SystemExit:
        shutil.rmtree(args.directory, ignore_errors=True)
        raise
    except NotConverted as error:
        _say("unsupported", str(error))
        return 1
    except OSError as error:
        _say("error", f"cannot be converted: {error.strerror or error}")
        return 1
    # A damaged file can make its readers raise any exception.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
        _say("error", f"cannot be read: {reason[:300]}")
        return 1
    return 0


def convert(path: Path, directory: Path, *, tokenizer_only: bool) -> None:
    """Write a checkpoint directory with the model and its tokenizer, or with the tokenizer only.

    Raises:
        NotConverted: transformers does not read this model, or not all of it.
        Exception: the file is damaged; its readers raise exceptions of many types.
    """
    metadata, _ = read_gguf_metadata(str(path), ("tokenizer.ggml.tokens",))
    # Link the file into an empty folder, because transformers also reads files beside it.
    with tempfile.TemporaryDirectory(prefix="specdec-gguf-") as folder:
        (Path(folder) / _LINK).symlink_to(path)
        tokenizer = _load_tokenizer(folder, metadata)
        tokenizer.save_pretrained(directory)
        _drop_made_up_tokens(directory / "tokenizer.json", len(metadata["tokenizer.ggml.tokens"]))
        ends = {
            "eos_token_id": _end_token_ids(metadata, tokenizer)
        }  # read beside engines that read the file themselves
        (directory / "generation_config.json").write_text(json.dumps(ends), "utf-8")
        if not tokenizer_only:
            _say("progress", str(_TOKENIZER_SHARE))
            set_tqdm_hook(_report_weights)
            _save_model(folder, directory, metadata, tokenizer)


def _load_tokenizer(folder: str, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    # AutoTokenizer gives the same result but takes eight times as long for Gemma's 256k tokens.
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
        folder, gguf_file=_LINK, local_files_only=True, trust_remote_code=False
    )
    if metadata.get("tokenizer.ggml.add_space_prefix") is False:
        _leave_out_space_prefix(tokenizer)
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


def _leave_out_space_prefix(tokenizer: PreTrainedTokenizerFast) -> None:
    """Let a text begin without a space, which transformers puts there for most vocabularies of SentencePiece."""
    backend, bare = tokenizer.backend_tokenizer, continuing_tokenizer(tokenizer)
    if bare is not tokenizer:
        backend.normalizer = bare.backend_tokenizer.normalizer
        backend.pre_tokenizer = bare.backend_tokenizer.pre_tokenizer
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])


def _drop_made_up_tokens(path: Path, num_tokens: int) -> None:
    """Remove tokens that the tokenizer class added by default: the model has no embedding row for them."""
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < num_tokens]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")


def _save_model(folder: str, directory: Path, metadata: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    if metadata.get("split.count", 1) > 1:
        raise NotConverted("is one of several parts: join them with llama-gguf-split --merge")
    require_equal_layers(metadata)
    file = GGUFReader(f"{folder}/{_LINK}")
    scaling = next((tensor.data for tensor in file.tensors if tensor.name == DIVISORS), None)
    try:
        # Build the configuration once: transformers parses the whole file each time, vocabulary included.
        config = AutoConfig.from_pretrained(folder, gguf_file=_LINK, trust_remote_code=False)
        settle(config, metadata, scaling)
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
    # Delete the mark that the weights were quantised: transformers refuses to save a model that has it.
    del model.hf_quantizer, model.config.quantization_config
    dtype = exact_dtype(model.state_dict().values())
    # The decorator of `to` in transformers hides `self` from the type checker.
    model.to(dtype).save_pretrained(directory)  # type: ignore[arg-type]


def _require_whole(file: GGUFReader, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raise NotConverted unless the file filled all weights of the model and no weight of the file was left over."""
    if missing := report["missing_keys"]:
        raise NotConverted(f"lacks the weight {min(missing)} ({len(missing)} in all)")
    in_file = sum(int(tensor.n_elements) for tensor in file.tensors if tensor.name != DIVISORS)
    in_model = sum(parameter.numel() for parameter in model.parameters())  # tied weights count once, as in the file
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
    """Return the narrowest dtype that represents every value of these float32 tensors exactly."""
    left = list(_HALF_DTYPES)
    for tensor in tensors:
        left = [dtype for dtype in left if torch.equal(tensor.to(dtype).float(), tensor)]
        if not left:
            break
    return (*left, torch.float32)[0]


def _report_weights(make_bar: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return what transformers iterates over when it would show a progress bar, and print the progress of weights."""
    bar = make_bar(*args, **options)
    return _reporting(args[0]) if options.get("desc") == "Loading weights" and args else bar


def _reporting(weights: Collection[Any]) -> Iterator[Any]:
    for index, weight in enumerate(weights):
        yield weight
        loaded = (index + 1) / len(weights)
        _say("progress", f"{_TOKENIZER_SHARE + loaded * (_LOADED_SHARE - _TOKENIZER_SHARE):.3f}")


def _say(kind: str, text: str) -> None:
    print(json.dumps({kind: text}), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the parent has ended
    sys.exit(main())
