"""`specdec up` with a draft that has another tokenizer than its target: real processes, one line that says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.client import Client
from tests.support.other_tokenizers import TEXTS, build_model, save_byte_level, save_pieces
from tests.support.target_alone import TargetAlone
from tests.support.up_rig import child_running, start_up

NUM_TOKENS = 24
TIE = 1e-4


def assert_greedy(target: TargetAlone, prompt: list[int], ours: tuple[int, ...]) -> None:
    theirs = target.greedy(prompt, NUM_TOKENS)
    for place, (our_id, their_id) in enumerate(zip(ours, theirs, strict=True)):
        if our_id != their_id:
            best = np.sort(target.logits([*prompt, *theirs[:place]])[-1])[-2:]
            assert best[1] - best[0] < TIE
            return


def test_up_sees_that_the_tokenizers_differ_and_a_draft_that_is_killed_costs_no_token(tmp_path: Path) -> None:
    target = build_model(save_pieces(tmp_path / "pieces"), tmp_path / "target")
    draft = build_model(save_byte_level(tmp_path / "bytes"), tmp_path / "draft")
    alone, tokenizer = TargetAlone(target), load_tokenizer(target)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    up, endpoint = start_up("--target", str(target), "--draft", str(draft), "--dtype", "float32")
    try:
        with Client(endpoint) as client:
            asked = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "gamma": 3, "ignore_eos": False}
            for prompt in prompts[:2]:
                completion = client.generate(prompt_token_ids=prompt, **asked)
                assert_greedy(alone, prompt, completion.token_ids)
                assert completion.stats.num_draft_tokens > 10
            killed = child_running(up, "draft_service")
            token_ids: list[int] = []
            for chunk in client.generate(prompt_token_ids=prompts[2], stream=True, **asked):
                if not token_ids:
                    os.kill(killed, signal.SIGKILL)
                token_ids += chunk.token_ids
            assert_greedy(alone, prompts[2], tuple(token_ids))
            completion = client.generate(prompt_token_ids=prompts[3], **asked)
            assert_greedy(alone, prompts[3], completion.token_ids)
    finally:
        up.send_signal(signal.SIGTERM)
        _, stderr = up.communicate(timeout=60)
    (note,) = [line for line in stderr.splitlines() if line.startswith("note:")]
    assert "another tokenizer" in note
    assert f"of its {len(load_tokenizer(draft).get_vocab()):,} tokens" in note
