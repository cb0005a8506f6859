"""The model behind an engine's server: its files here, and the probes that tell it from other models.

A backend reads tokenizer, end tokens and context from a checkpoint (`--model`), without its weights. The server's
model is identified by its greedy continuations of fixed prompts. Called by the backends that reach their engine over
HTTP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.checkpoints.generation_config import end_token_ids
from specdec.checkpoints.gguf.file import GgufFile, is_gguf
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.vocabulary import load_tokenizer, load_vocabulary, vocabulary_fingerprint, vocabulary_size
from specdec.contract.errors import InvalidSetting

#: Number and length of the prompts that identify a model, and number of tokens of each continuation.
_NUM_PROBES, _PROBE_TOKENS, NUM_PROBED_TOKENS = 4, 16, 12

#: Stands for bytes that do not form a character.
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"

Continue = Callable[[Sequence[int]], Awaitable[Sequence[int]]]
"""Returns the `NUM_PROBED_TOKENS` greedy tokens after a prompt."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Description of a model by the small files of its checkpoint."""

    vocabulary_size: int
    vocabulary_fingerprint: str
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int | None
    """The model's own limit; None if its config.json states none."""
    is_recurrent: bool = False
    """True for a GGUF file of a model with recurrent layers."""


def read_model_files(model: str) -> ModelFiles:
    """Read a checkpoint's tokenizer and configuration.

    Args:
        model: a checkpoint directory, a GGUF file or a hub id.

    Raises:
        InvalidRequest: the files are missing or unreadable.
    """
    path, vocabulary = Path(model).expanduser(), load_vocabulary(model)
    directory = locate_checkpoint(model, small_files_only=True)
    config = _read_json(directory / "config.json")
    config = {**config, **(config.get("text_config") or {})}
    context, num_tokens = config.get("max_position_embeddings"), vocabulary_size(vocabulary)
    return ModelFiles(
        vocabulary_size=num_tokens,
        vocabulary_fingerprint=vocabulary_fingerprint(vocabulary),
        eos_token_ids=end_token_ids(directory, num_tokens, config.get("eos_token_id")),
        max_context_tokens=int(context) if isinstance(context, int | float) and context >= 1 else None,
        is_recurrent=is_gguf(path) and GgufFile(path).is_recurrent,
    )


async def fingerprint_of(files: ModelFiles, served_name: str, continue_greedily: Continue) -> str:
    """Return a fingerprint of the model that a server serves: 32 hex digits.

    Replicas with equal fingerprints continue each other's sessions, so a fingerprint contains what decides the tokens:
    the vocabulary, the name under which the server knows the model, and continuations of fixed prompts. The name of an
    adapter follows the fingerprint of its base model.
    """
    digest = hashlib.blake2b(f"{files.vocabulary_fingerprint} {served_name}".encode(), digest_size=16)
    for probe in probes(files.vocabulary_size):
        digest.update(json.dumps(list(await continue_greedily(probe))).encode())
    return digest.hexdigest()


def require_token_ids(token_ids: Sequence[int], files: ModelFiles, url: str) -> None:
    """Raise InvalidSetting if a server names token ids that the vocabulary of --model does not have."""
    largest = max(token_ids, default=0)
    if largest >= files.vocabulary_size:
        raise InvalidSetting(
            f"model: {url} answers token id {largest}, the vocabulary of --model has {files.vocabulary_size}; "
            "name the checkpoint that the server serves",
            field="model",
        )


def require_same_texts(model: str, written: Sequence[tuple[Sequence[int], str]], url: str) -> None:
    """Require that the tokenizer of --model writes the token ids of a server as the server does.

    Servers differ in the spaces at the ends of a text, and in bytes of an unfinished character, so a server passes with
    one equal text. One without texts passes, too.

    Args:
        model: checkpoint of the tokenizer.
        written: token ids, and the text that the server states for them.
        url: address of the server.

    Raises:
        InvalidSetting: all texts differ, as those of another tokenizer with as many tokens.
    """
    tokenizer = load_tokenizer(model)
    texts = [(text, str(tokenizer.decode(list(token_ids), skip_special_tokens=True))) for token_ids, text in written]
    whole = [pair for pair in texts if all(text.strip() and _NO_CHARACTER not in text for text in pair)]
    if whole and not any(theirs.split() == ours.split() for theirs, ours in whole):
        theirs, ours = whole[0]
        raise InvalidSetting(
            f"model: {url} writes {theirs[:40]!r} where the tokenizer of --model writes {ours[:40]!r}; name the "
            "checkpoint that the server serves",
            field="model",
        )


def probes(size: int) -> list[list[int]]:
    """Return fixed prompts whose ids are spread over the vocabulary."""
    return [
        [(7919 * (_PROBE_TOKENS * probe + place) + 104_729) % size for place in range(_PROBE_TOKENS)]
        for probe in range(_NUM_PROBES)
    ]


def _read_json(path: Any) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"model: {path} cannot be read: {error}", field="model") from error
    return content if isinstance(content, dict) else {}
