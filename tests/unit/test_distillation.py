"""The loss and the metrics of distillation against direct sums, and the reading of a learning log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.contract.errors import InvalidRequest, VocabularyMismatch
from specdec.contract.types import WEIGHT_TOTAL
from specdec.learning.learner import Learner
from specdec.learning.log_files import LogFacts, LoggedTurn, encode_segment
from specdec.learning.samples import Samples, TrainingBatch, batches_of
from specdec.learning.training import TrainingPlan, acceptance, divergence, train

FACTS = LogFacts("target", "words", 50)


def batch_of(p: np.ndarray, num_entries: int, temperature: float) -> TrainingBatch:
    """Return a batch with the top entries of each row of p; the other tokens are in the tail mass."""
    likeliest = np.argsort(-p, axis=-1)[:, :num_entries]
    count = len(p)
    return TrainingBatch(
        np.zeros((1, count + 1), np.int64), np.arange(count), np.full(count, temperature, np.float32), likeliest,
        np.take_along_axis(p, likeliest, -1).astype(np.float32),
    )  # fmt: skip


def softmax(scores: np.ndarray) -> np.ndarray:
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)


@pytest.mark.parametrize("num_entries", [1, 5, 20])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_loss_is_the_divergence_of_the_entries_and_the_tail_mass(num_entries: int, temperature: float) -> None:
    dice = np.random.default_rng(num_entries)
    p, logits = softmax(dice.normal(size=(7, 20))), dice.normal(size=(7, 20))
    q = softmax(logits / temperature)
    batch = batch_of(p, num_entries, temperature)
    of_p, of_q = (
        np.concatenate([part, np.maximum(1 - part.sum(-1, keepdims=True), 1e-12)], -1)
        for part in (np.take_along_axis(law, batch.entry_ids, -1) for law in (p, q))
    )
    expected = (of_p * np.log(of_p / of_q)).sum(-1)
    told = torch.from_numpy(logits.astype(np.float32))
    assert divergence(told, batch).numpy() == pytest.approx(expected, abs=1e-4)
    overlap = np.minimum(of_p, of_q)[:, :-1].sum(-1)
    assert acceptance(told, batch).numpy() == pytest.approx(overlap, abs=1e-5)


def test_a_draft_equal_to_the_target_has_no_divergence_and_no_gradient() -> None:
    logits = torch.randn(5, 20, requires_grad=True, generator=torch.Generator().manual_seed(0))
    batch = batch_of(logits.detach().softmax(-1).numpy(), 8, 1.0)
    loss = divergence(logits, batch).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-5)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-5


def test_a_token_outside_the_drafts_vocabulary_counts_towards_the_tail_mass() -> None:
    p = np.array([[0.5, 0.3, 0.15, 0.05]])
    batch = replace(
        batch_of(p, 3, 1.0), entry_ids=np.array([[0, 1, 2, 0]]), shares=np.array([[0.5, 0.3, 0.15, 0.0]], np.float32)
    )
    logits = torch.tensor([[1.0, -torch.inf, 0.0, 2.0]], requires_grad=True)
    q = logits.detach().softmax(-1)[0].numpy()
    of_p, of_q = np.array([0.5, 0.15, 0.35]), np.array([q[0], q[2], q[3]])  # the entry with share 0 is padding
    told = divergence(logits, batch)
    assert told.item() == pytest.approx(float((of_p * np.log(of_p / of_q)).sum()), abs=1e-5)
    told.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert acceptance(logits, batch).item() == pytest.approx(min(0.5, q[0]) + min(0.15, q[2]), abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-38, 1e-3])
def test_a_request_with_a_tiny_temperature_does_not_outweigh_others(temperature: float) -> None:
    p = softmax(np.random.default_rng(0).normal(size=(7, 20)) / 0.1)
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(1))
    assert divergence(logits, batch_of(p, 8, temperature)).numpy() == pytest.approx(
        divergence(logits, batch_of(p, 8, 0.1)).numpy(), abs=1e-4
    )


class Two(Learner):
    """A learner with two depths, each with the same logits at every place."""

    width = 8

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.parameters = [torch.randn(20, generator=draw).requires_grad_() for _ in range(2)]
        self.dtypes = [torch.float32, torch.bfloat16]

    def depths(self, batch: TrainingBatch) -> Iterator[tuple[torch.Tensor, TrainingBatch]]:
        for depth, parameter in enumerate(self.parameters):
            drafted = batch.beyond(depth)
            yield parameter.expand(len(drafted.places), -1), drafted


def test_every_depth_is_trained_and_evaluated_in_the_dtype_it_is_stored_in(tmp_path: Path) -> None:
    write(tmp_path, "a", *(turn(session) for session in range(16)))
    samples = Samples(tmp_path, "default", "words", 50)
    samples.learned = [replace(row, entry_ids=row.entry_ids % 20) for row in samples.learned]
    samples.held_out = [replace(row, entry_ids=row.entry_ids % 20) for row in samples.held_out]
    learner = Two()
    first = [parameter.detach().clone() for parameter in learner.parameters]
    learned = train(learner, samples, TrainingPlan(600.0, max_steps=3, learning_rate=0.05))
    assert all(
        (parameter - before).abs().max() > 0.01 for parameter, before in zip(learner.parameters, first, strict=True)
    )
    assert torch.equal(learner.parameters[1], learner.parameters[1].bfloat16().float())
    (batch,) = batches_of(samples.held_out, 2048)
    for figures, numbers in ((learned.before, first), (learned.after, learner.parameters)):
        each = [
            divergence(numbers[depth].expand(len(batch.beyond(depth).places), -1), batch.beyond(depth))
            for depth in range(2)
        ]
        assert figures.kl_nats == pytest.approx(torch.cat(each).mean().item(), rel=1e-5)


def test_a_greedy_target_is_compared_by_its_choice_only() -> None:
    p = np.eye(6)[[2, 3]]
    logits = torch.tensor([[0.0, 0, 5, 0, 0, 0], [0.0, 0, 5, 0, 0, 0]])
    batch = batch_of(p, 1, 0.0)
    assert acceptance(logits, batch).tolist() == [1.0, 0.0]
    assert divergence(logits, batch).numpy() == pytest.approx(
        -torch.log_softmax(logits, -1)[[0, 1], [2, 3]].numpy(), abs=1e-5
    )


def turn(session: int, num_tokens: int = 6, start: int = 2) -> LoggedTurn:
    """Return a turn whose distributions all give weight 1 to the token that follows."""
    token_ids = (np.arange(num_tokens) % 40).astype(np.uint32)
    count = num_tokens - start
    return LoggedTurn(session, 1.0, token_ids, start, np.ones(count, np.uint8), token_ids[start:],
                      np.full(count, WEIGHT_TOTAL, np.uint32))  # fmt: skip


def write(log: Path, name: str, *turns: LoggedTurn, facts: LogFacts = FACTS) -> None:
    folder = log / "tenant-default"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.safetensors").write_bytes(encode_segment(facts, turns))


def test_a_long_turn_becomes_consecutive_rows(tmp_path: Path) -> None:
    write(tmp_path, "a", turn(1), turn(2, num_tokens=1500, start=100))
    samples = Samples(tmp_path, "default", "words", 50)
    assert [row.token_ids.tolist() for row in samples.held_out] == [[0, 1, 2, 3, 4, 5]]
    long = np.arange(1500) % 40
    assert sum(row.num_learned for row in samples.learned) == 1400
    assert np.concatenate([row.entry_ids for row in samples.learned]).tolist() == long[100:].tolist()
    assert max(len(row.token_ids) for row in samples.learned) == 512
    for batch in samples.batches(1024, np.random.default_rng(0)):
        following = batch.token_ids.reshape(-1)[batch.places + 1]
        assert following.tolist() == batch.entry_ids[:, 0].tolist()  # a place is one position before its token


def test_later_segments_are_read_and_held_out_sessions_stay_held_out(tmp_path: Path) -> None:
    write(tmp_path, "a", *(turn(session) for session in range(16)))
    samples = Samples(tmp_path, "default", "words", 50)
    assert (len(samples.held_out), len(samples.learned)) == (2, 14)
    write(tmp_path, "b", turn(0), turn(9), turn(99))
    write(tmp_path, "c", turn(5), facts=LogFacts("another", "words", 50))
    samples.read_on()
    samples.read_on()
    assert (len(samples.held_out), len(samples.learned)) == (3, 16)


def test_a_log_that_cannot_train_the_draft_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(words: str, target: str = "", vocabulary: str = "words") -> None:
        with pytest.raises((InvalidRequest, VocabularyMismatch), match=words) as caught:
            Samples(tmp_path, "default", vocabulary, 50, target)
        assert "\n" not in str(caught.value)

    refused("found no learning log in")
    (tmp_path / "tenant-default").mkdir()
    refused("is empty")
    write(tmp_path, "a", turn(1), turn(1))
    refused("has turns of only one session")
    write(tmp_path, "b", turn(2))
    refused("has fingerprint words, that of the draft to train others", vocabulary="others")
    refused("has no turns of target gone, only of target", target="gone")
    write(tmp_path, "c", turn(3), facts=LogFacts("another", "words", 50))
    refused("turns of several targets, another and target: choose one with --target")
    Samples(tmp_path, "default", "words", 50, "target")
    write(tmp_path, "c", turn(3), facts=LogFacts("target", "words", 51))
    refused("has a vocabulary of 51 tokens, that of the draft has 50")
    write(tmp_path, "c", turn(3))
    (tmp_path / "tenant-default" / "d.safetensors").write_bytes(b"\x80\x04.")
    refused(r"d\.safetensors is not a learning log segment", target="target")
