"""Values of `--local-draft` and `specdec up --draft`."""

from __future__ import annotations

import pytest

from specdec.settings.draft_specs import LocalDraftSpec, is_local_draft, parse_local_draft, parse_local_drafts


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("early-exit:3", LocalDraftSpec("early-exit", "early-exit", 3)),
        ("early-exit:3:/a=b/c:d", LocalDraftSpec("early-exit", "early-exit", 3, "/a=b/c:d")),
        ("short=early-exit:2", LocalDraftSpec("short", "early-exit", 2)),
        ("eagle3:/heads", LocalDraftSpec("eagle3", "eagle3", path="/heads")),
        ("mtp", LocalDraftSpec("mtp", "mtp")),
    ],
)
def test_a_local_draft_is_parsed_into_a_name_a_kind_and_its_parameters(text: str, spec: LocalDraftSpec) -> None:
    assert parse_local_draft(text) == spec
    assert is_local_draft(text)


@pytest.mark.parametrize(
    "text",
    ["early-exit", "early-exit:", "early-exit:0", "early-exit:-1", "early-exit:three", "medusa", "mtp:PATH", "=mtp",
     "a b=mtp", "gpt2"],
)  # fmt: skip
def test_an_invalid_local_draft_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"early-exit|takes|the name of a pool must be"):
        parse_local_draft(text)


def test_two_local_drafts_of_one_kind_need_names() -> None:
    with pytest.raises(ValueError, match="two local drafts are called 'early-exit'"):
        parse_local_drafts(("early-exit:2", "early-exit:3"))
    assert [spec.name for spec in parse_local_drafts(("early-exit:2", "longer=early-exit:3"))] == [
        "early-exit",
        "longer",
    ]


@pytest.mark.parametrize("text", ["models/demo/draft", "hub/medusa", "ngram", "./early-exit"])
def test_a_model_name_is_not_read_as_a_local_draft(text: str) -> None:
    assert not is_local_draft(text)
