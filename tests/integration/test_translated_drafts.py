"""Drafts with a tokenizer of their own through running services: the target's text, and drafts that are accepted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from draft_service.cross_vocabulary.translating_proposer import CrossVocabularyProposer
from specdec.checkpoints.cross_vocabulary.token_map import TokenMap
from specdec.checkpoints.vocabulary import load_tokenizer, load_vocabulary, vocabulary_fingerprint
from specdec.contract.constraint import Constraint
from specdec.contract.errors import KvMiss, StaleEpoch
from specdec.contract.types import ProposeRequest
from tests.support.cross_vocabulary_rig import cross_vocabulary_stack, load
from tests.support.other_tokenizers import (
    CORPUS,
    TEXTS,
    build_cross_vocabulary_copy,
    build_model,
    load_pair,
    save_byte_level,
    save_characters,
    save_pieces,
)
from tests.support.round_driver import make_round
from tests.support.target_alone import TargetAlone

NUM_TOKENS = 32
TIE = 1e-4
SENTENCES = ["bad egg", "é 今天 nice dome", "üben\n\n  ß", "🌲 line\nkidding 天天", " a b c", "fed no mango in jail 今"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models, one of byte-level tokens and one of pieces."""
    folder = tmp_path_factory.mktemp("trained")
    tokenizers = {"bytes": save_byte_level(folder / "t-bytes"), "pieces": save_pieces(folder / "t-pieces")}
    return {name: build_model(tokenizer, folder / name) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of pieces, and its own weights in byte-level tokens."""
    folder = tmp_path_factory.mktemp("characters")
    in_bytes = save_characters(folder / "t-bytes", in_bytes=True)
    in_pieces = save_characters(folder / "t-pieces", in_bytes=False)
    target = build_model(in_pieces, folder / "target")
    return target, build_cross_vocabulary_copy(target, in_bytes, folder / "draft")


def assert_greedy(target: TargetAlone, prompt: list[int], ours: list[int]) -> None:
    theirs = target.greedy(prompt, NUM_TOKENS)
    if ours == theirs:
        return
    place = next(at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    best = np.sort(target.logits([*prompt, *theirs[:place]])[-1])[-2:]
    assert best[1] - best[0] < TIE, f"token {place} is {ours[place]}, not {theirs[place]}"


async def accepted_of_drafted(target: Path, draft: Path, **asked: object) -> tuple[int, int]:
    """Draft tokens over all sentences, greedy unless asked otherwise."""
    tokenizer = load_tokenizer(target)
    async with cross_vocabulary_stack(target, draft) as run:
        options = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "gamma": 4, "ignore_eos": True, **asked}
        done = [await run.stack.generate(tokenizer.encode(text), **options) for text in SENTENCES]
    return (
        sum(completion.stats.num_accepted_tokens for completion in done),
        sum(completion.stats.num_draft_tokens for completion in done),
    )


async def test_a_model_that_drafts_for_itself_in_other_tokens_is_accepted_whole(characters: tuple[Path, Path]) -> None:
    accepted, drafted = await accepted_of_drafted(*characters)
    assert drafted > 100
    assert accepted == drafted


CONSTRAINTS = [
    Constraint.regex("[a-f ]{6}(dog|cab|éü){3}\n[a-o]+"),
    Constraint.choice(["mango in jail", "man on a hill", "今天 dog 天天", "今天天 dog"]),
]


async def test_a_constrained_draft_in_other_tokens_is_accepted_whole_and_changes_no_text(
    characters: tuple[Path, Path],
) -> None:
    """A draft that ignores the constraint is the control: it has the same texts, and fewer accepted tokens."""
    prompt = load_tokenizer(characters[0]).encode(SENTENCES[0])
    texts, counts = list[list[list[int]]](), list[tuple[int, int]]()
    options: dict[str, object] = {"max_new_tokens": NUM_TOKENS, "gamma": 4}
    for masks_drafts, mode in ((True, "off"), (True, "coupled"), (False, "coupled")):
        async with cross_vocabulary_stack(*characters, masks_drafts=masks_drafts) as run:
            done = [
                await run.stack.generate(prompt, constraint=constraint, mode=mode, **sampling, **options)
                for constraint in CONSTRAINTS
                for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 4})
            ]
        texts.append([completion.token_ids for completion in done])
        stats = [completion.stats for completion in done]
        counts.append((sum(each.num_draft_tokens for each in stats), sum(each.num_accepted_tokens for each in stats)))
    assert texts[0] == texts[1] == texts[2]
    (drafted, accepted), (drafted_unmasked, accepted_unmasked) = counts[1:]
    assert drafted == accepted > 40
    assert accepted_unmasked < drafted_unmasked


async def test_coupled_drafts_of_the_same_model_share_the_targets_noise(characters: tuple[Path, Path]) -> None:
    sampled = {"temperature": 0.5, "mode": "coupled", "seed": 3}
    accepted, drafted = await accepted_of_drafted(*characters, **sampled)
    assert accepted > 0.9 * drafted


SAMPLED = {"temperature": 1.0, "seed": 3}


async def test_sampled_drafts_of_the_same_model_are_accepted_but_for_what_is_cut(characters: tuple[Path, Path]) -> None:
    accepted, drafted = await accepted_of_drafted(*characters, **SAMPLED)
    assert accepted > 0.85 * drafted


async def test_tokens_mapped_by_spelling_would_lose_text_that_is_not_ascii(characters: tuple[Path, Path]) -> None:
    """Negative control of the map on bytes: what no spelling has in common is left to point masses."""
    target, draft = characters
    spellings, theirs = load_vocabulary(draft), load_vocabulary(target)
    pair = load_pair(draft, target)
    target_of, draft_vocab_of = np.full_like(pair.tokens.target_of, -1), np.full_like(pair.tokens.draft_vocab_of, -1)
    for token in spellings.keys() & theirs.keys():
        target_of[spellings[token]], draft_vocab_of[theirs[token]] = theirs[token], spellings[token]
    with patch("specdec.checkpoints.cross_vocabulary.pair.map_tokens", lambda *_: TokenMap(target_of, draft_vocab_of)):
        accepted, drafted = await accepted_of_drafted(target, draft, **SAMPLED)
    assert accepted < 0.7 * drafted


@pytest.mark.parametrize(("target", "draft"), [("bytes", "pieces"), ("pieces", "bytes")])
async def test_greedy_text_is_that_of_generate(trained: dict[str, Path], target: str, draft: str) -> None:
    alone, tokenizer = TargetAlone(trained[target]), load_tokenizer(trained[target])
    prompts = [tokenizer.encode(text) for text in [*TEXTS, *CORPUS[:6]]]
    async with cross_vocabulary_stack(trained[target], trained[draft]) as run:
        done = await asyncio.gather(
            *(
                run.stack.generate(prompt, temperature=0.0, max_new_tokens=NUM_TOKENS, gamma=1 + index % 4)
                for index, prompt in enumerate(prompts)
            )
        )
        for prompt, completion in zip(prompts, done, strict=True):
            assert_greedy(alone, prompt, list(completion.token_ids))
        assert sum(completion.stats.num_draft_tokens for completion in done) > 100


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_seeds_coupled_text_is_that_of_the_target_alone(trained: dict[str, Path], seed: int) -> None:
    prompt = load_tokenizer(trained["pieces"]).encode(TEXTS[1])
    sampled = {"temperature": 1.0, "seed": seed, "max_new_tokens": NUM_TOKENS, "top_p": 0.9}
    async with cross_vocabulary_stack(trained["pieces"], trained["bytes"]) as run:
        alone = await run.stack.generate(prompt, mode="off", **sampled)
        drafted = await run.stack.generate(prompt, mode="coupled", gamma=3, **sampled)
        assert drafted.token_ids == alone.token_ids
        assert drafted.stats.num_draft_tokens > 10


def test_the_replica_serves_the_targets_vocabulary(trained: dict[str, Path]) -> None:
    proposer = CrossVocabularyProposer(load(trained["bytes"]), load_pair(trained["bytes"], trained["pieces"]))
    info, vocabulary = proposer.info(), load_vocabulary(trained["pieces"])
    assert info.vocabulary_fingerprint == vocabulary_fingerprint(vocabulary)
    assert info.vocabulary_size == len(vocabulary)
    assert info.eos_token_ids == (vocabulary["</s>"],)
    for_itself = load(trained["bytes"]).shape.model_fingerprint
    assert info.model_fingerprint != for_itself
    asyncio.run(proposer.close())


async def test_the_position_protocol_is_in_the_targets_tokens(trained: dict[str, Path]) -> None:
    committed = load_tokenizer(trained["pieces"]).encode("".join(CORPUS[:6]))
    proposer = CrossVocabularyProposer(load(trained["bytes"]), load_pair(trained["bytes"], trained["pieces"]))

    def asked(tokens: list[int], **where: int) -> ProposeRequest:
        return ProposeRequest(make_round(tokens, **where), 3)

    with pytest.raises(KvMiss) as miss:
        await proposer.propose(asked(committed, start=40))
    assert miss.value.have == 0
    first = await proposer.propose(asked(committed))
    assert first.kv_len == len(committed)
    again = await proposer.propose(asked(committed))
    assert again.draft_token_ids.tolist() == first.draft_token_ids.tolist()
    grown = [*committed, *first.draft_token_ids.tolist()]
    second = await proposer.propose(asked(grown, start=len(committed), round_id=1))
    assert second.num_cached_tokens > len(committed) - 32  # it ran what is new, and a segment at most
    # Tokens that were not to stay: the answer is that of a session that never had them.
    cut = committed[: len(committed) // 2]
    rolled_back = await proposer.propose(asked([*cut, 7], start=len(cut), round_id=2))
    fresh = await proposer.propose(ProposeRequest(make_round([*cut, 7], session_id="fresh"), 3))
    assert rolled_back.draft_token_ids.tolist() == fresh.draft_token_ids.tolist()
    with pytest.raises(KvMiss) as miss:
        await proposer.propose(asked(grown, start=len(committed), round_id=3))
    assert miss.value.have <= len(cut)
    with pytest.raises(StaleEpoch):
        await proposer.propose(asked(committed, round_id=1))
    await proposer.release(["s", "fresh"])
    with pytest.raises(KvMiss):
        await proposer.propose(asked(grown, start=len(cut), round_id=4))
    proposer.check_integrity()
    await proposer.close()


async def test_a_session_longer_than_the_drafts_context_gets_no_draft(trained: dict[str, Path]) -> None:
    committed = load_tokenizer(trained["pieces"]).encode("今天 " * 400)
    proposer = CrossVocabularyProposer(load(trained["bytes"]), load_pair(trained["bytes"], trained["pieces"]))
    proposal = await proposer.propose(ProposeRequest(make_round(committed), 3))
    assert not len(proposal.draft_token_ids)
    await proposer.close()


async def test_a_session_in_mid_character_is_drafted_for(trained: dict[str, Path]) -> None:
    for target, draft in (("bytes", "pieces"), ("pieces", "bytes")):
        committed = load_tokenizer(trained[target]).encode("ab 🐎")[:-2]
        proposer = CrossVocabularyProposer(load(trained[draft]), load_pair(trained[draft], trained[target]))
        await proposer.propose(ProposeRequest(make_round(committed), 3))
        proposer.check_integrity()
        await proposer.close()
