"""The suite on a real model: its files of other types, and which ratios it draws of what is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.suites.real import suite as real
from bench.systems.models import DEMO


@pytest.mark.parametrize(("kind", "digits"), [("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", 2**-6)])
def test_a_file_of_another_type_holds_the_same_model(tmp_path: Path, kind: str, digits: float) -> None:
    gguf = pytest.importorskip("gguf")
    from bench.systems.gguf_writing import rewrite, write_gguf

    source = write_gguf(DEMO / "draft", tmp_path / "source.gguf", "F32")
    before, after = (gguf.GGUFReader(path) for path in (source, rewrite(source, tmp_path / "made.gguf", kind)))
    assert {name: field.contents() for name, field in after.fields.items()} == {
        name: field.contents() for name, field in before.fields.items()
    }
    kinds = set()
    for old, new in zip(before.tensors, after.tensors, strict=True):
        values = gguf.quants.dequantize(new.data, new.tensor_type)
        assert (old.name, old.data.shape) == (new.name, values.shape)
        assert np.abs(values - old.data).max() <= digits * np.abs(old.data).max()
        kinds.add(new.tensor_type.name)
    assert kinds == {kind, "F32"}


def test_without_llama_cpp_the_other_ratios_are_drawn() -> None:
    rates = {real.OURS: 30.0, real.OURS_INT8: 60.0, real.OURS_KEPT: 50.0, real.OURS_WIDENED: 25.0, real.PLAIN: 10.0,
             real.LOOKUP: 15.0}  # fmt: skip
    systems = {name: (lambda prompt, rate=rate: rate) for name, rate in rates.items()}
    rows = real._one_stream(systems, [[1], [2]], quick=True)
    ratios = {(row.system, row.ratio_to): (row.value, row.required) for row in rows if row.ratio_to}
    assert ratios == {
        (real.OURS, real.PLAIN): (3.0, 5.0), (real.OURS, real.LOOKUP): (2.0, None),
        (real.OURS_KEPT, real.OURS_WIDENED): (2.0, None), (real.OURS_INT8, real.PLAIN): (6.0, None),
    }  # fmt: skip
    assert {row.system: row.value for row in rows if not row.ratio_to} == rates


def test_there_are_twenty_questions_and_some_have_emoji() -> None:
    questions = real.chat_prompts()
    assert len(set(questions)) == 20
    assert any(max(question) > "\U0001f000" for question in questions)
