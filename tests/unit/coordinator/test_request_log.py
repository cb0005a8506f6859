"""A request that was written to the store reads back exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import pytest

from coordinator.generation.request_log import (
    decode_parameters,
    decode_stats,
    encode_parameters,
    encode_stats,
    identity_of,
    record_of,
)
from coordinator.requests import GenerationIdentity, RequestParameters, RequestStats, SpeculationChoice
from specdec.contract.constraint import Constraint, ConstraintKind
from specdec.contract.errors import SessionLost
from specdec.contract.output_form import Layout, OutputForm, ReasoningFormat
from specdec.contract.types import Mode, SamplingFilters, SamplingParams


def parameters() -> RequestParameters:
    filters = SamplingFilters(
        temperature=0.7 + 1e-12,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=MappingProxyType({3: -1.5, 100_000: 2.0}),
        min_new_tokens=4,
        end_token_ids=(1, 2),
    )
    sampling = SamplingParams(
        max_new_tokens=99,
        filters=filters,
        seed=2**64 - 1,
        stop=("a", "é\n"),
        stop_token_ids=(5,),
        ignore_eos=True,
        num_logprobs=3,
    )
    return RequestParameters(sampling, SpeculationChoice(mode=Mode.BLOCK, gamma=None, draft_pool="small"), "f00d")


def test_parameters_survive_the_store_bit_for_bit() -> None:
    stored = decode_parameters(encode_parameters(parameters()))
    assert dict(stored.sampling.filters.logit_bias) == dict(parameters().sampling.filters.logit_bias)
    assert stored == parameters()


def test_a_constraint_survives_the_store_with_its_warnings() -> None:
    plain = parameters()
    constraint = Constraint.json_schema({"enum": ["é", None]}, is_lenient=True)
    filters = replace(plain.sampling.filters, constraint_id=bytes(range(16)))
    sampling = replace(plain.sampling, constraint=constraint, filters=filters)
    for warnings in ((), ('Unimplemented keys: ["not"]', "Unknown format: é")):
        kept = replace(plain, sampling=sampling, constraint_warnings=warnings)
        assert decode_parameters(encode_parameters(kept)) == kept


def test_the_form_of_an_output_survives_the_store() -> None:
    reasoning = ReasoningFormat("think", "<think>", "</think>", after_opener="\n")
    form = OutputForm(
        "qwen_xml", Layout(true="True", sorts_keys=True), reasoning, True, {"f": ("a", "b"), "g": ()}, True
    )
    constraint = Constraint(ConstraintKind.STRUCTURAL, 'start: "a"')
    sampling = replace(parameters().sampling, constraint=constraint)
    sampling = replace(sampling, filters=replace(sampling.filters, constraint_id=b"i" * 16))
    formed = replace(parameters(), output_form=form, sampling=sampling)
    assert decode_parameters(encode_parameters(formed)) == formed
    stored = json.loads(encode_parameters(formed))
    del stored["sampling"]["output_form"]["names_tool"]  # as an older version stored it
    assert decode_parameters(json.dumps(stored)).output_form == replace(form, names_tool=False)
    del stored["sampling"]["output_form"]["layout"]
    with pytest.raises(SessionLost, match="damaged"):
        decode_parameters(json.dumps(stored))


def test_an_adapter_survives_the_store_and_no_older_version_goes_on_without_it() -> None:
    kept = replace(parameters(), adapter="sql")
    assert decode_parameters(encode_parameters(kept)) == kept
    assert json.loads(encode_parameters(kept))["sampling"]["adapter"] == "sql"  # which older versions refuse
    assert "adapter" not in encode_parameters(parameters())


def test_statistics_survive_the_store_and_missing_counters_are_zero() -> None:
    stats = RequestStats(num_rounds=3, accepted_per_position=[2, 1], ttft_s=0.25, wire_bytes=2**40)
    assert decode_stats(encode_stats(stats)) == stats
    assert decode_stats("{}") == RequestStats()


def test_an_identity_survives_the_store() -> None:
    identity = GenerationIdentity(
        session_id="s", request_id="r", digest="d", turn=2, output_start=17, parameters=parameters()
    )
    assert identity_of("s", record_of(identity)) == identity
