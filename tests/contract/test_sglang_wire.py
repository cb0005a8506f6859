"""The wire of the backend `sglang`: recorded requests, and answers in SGLang's shape.

Fields and types were read in the wheel of SGLang 0.5.23 on PyPI (sha256 00b3cd5b265a…): requests in
sglang/api/v1/api_types.py (`GenerateRequest`, and `SamplingParams`, which refuses unknown names),
srt/managers/io_struct.py (`GenerateReqInput`) and srt/sampling/sampling_params.py; answers in
srt/managers/tokenizer_manager.py and srt/managers/scheduler_components/logprob_result_processor.py; the description in
srt/entrypoints/http_server.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.contract.errors import Internal, InvalidSetting
from specdec.contract.types import DrawRule, SamplingFilters, SessionPosition
from specdec.engine.remote.connection import Connection
from target_service.backends.contract import BackendShape, RowsRequest
from target_service.backends.sglang import SglangBackend, open_sglang
from tests.support.backend_rig import backend_system, table_model, write_checkpoint
from tests.support.coordinator_rig import PROMPT, request
from tests.support.engine_server import EngineServer

TOKENS, DRAFT = [5, 6, 7], [3, 4]

Check = Callable[[Any], bool]


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_float(value: Any) -> bool:
    return isinstance(value, float) or is_int(value)


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_int_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_int, value))


#: Fields of SGLang's requests that the backend may send, with their types there.
GENERATE_FIELDS: Mapping[str, Check] = {
    "input_ids": is_int_list,
    "sampling_params": lambda value: isinstance(value, dict),
    "return_logprob": is_bool,
    "logprob_start_len": is_int,
    "top_logprobs_num": is_int,
    "token_ids_logprob": is_int_list,
    "extra_key": is_text,
}
SAMPLING_FIELDS: Mapping[str, Check] = {
    "max_new_tokens": is_int,
    "min_new_tokens": is_int,
    "stop_token_ids": is_int_list,
    "ignore_eos": is_bool,
    "temperature": is_float,
    "top_p": is_float,
    "top_k": is_int,
    "min_p": is_float,
    "sampling_seed": is_int,
}

#: Seeds of the positions 3, 4 and 5 of a request with the seed 3.
SEEDS = (2134963326, 1593687359, 1125815808)


def greedy(input_ids: list[int], num_top: int, start: int, **fields: Any) -> dict[str, Any]:
    """Return the recorded request for the likeliest tokens from a token on."""
    return {
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0.0},
        "return_logprob": True,
        "top_logprobs_num": num_top,
        "logprob_start_len": start,
        **fields,
    }


def sample(input_ids: list[int], seed: int, **params: Any) -> dict[str, Any]:
    """Return the recorded request for a sample at the temperature 0.5."""
    filters = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    return {
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, **filters, "sampling_seed": seed, **params},
    }


MASKED = {"min_new_tokens": 1, "stop_token_ids": [1, 9], "ignore_eos": False}
RECORDED = {
    "a greedy round": ({"temperature": 0.0}, {}, [greedy([5, 6, 7, 3, 4], 1, 2)]),
    "a round with top-k": ({"temperature": 0.5, "top_k": 4}, {}, [greedy([5, 6, 7, 3, 4], 5, 2)]),
    "a greedy round with masked ends": (
        {"temperature": 0.0, "min_new_tokens": 9, "end_token_ids": (1, 9)},
        {},
        [greedy([5, 6, 7, 3, 4], 3, 2)],
    ),
    "sampled rows": (
        {"temperature": 0.5},
        {},
        [sample(prefix, seed) for prefix, seed in zip(([5, 6, 7], [5, 6, 7, 3], [5, 6, 7, 3, 4]), SEEDS, strict=True)],
    ),
    "sampled rows, the first of which masks ends": (
        {"temperature": 0.5, "min_new_tokens": 1, "end_token_ids": (1, 9)},
        {},
        [
            sample([5, 6, 7], SEEDS[0], **MASKED),
            sample([5, 6, 7, 3], SEEDS[1]),
            sample([5, 6, 7, 3, 4], SEEDS[2]),
        ],
    ),
    "a tenant's round": (
        {"temperature": 0.0},
        {"tenant": "acme"},
        [greedy([5, 6, 7, 3, 4], 1, 2, extra_key="specdec tenant acme")],
    ),
}  # fmt: skip


def question(filters: Mapping[str, Any], num_logprobs: int | None = None, draft: Sequence[int] = DRAFT) -> RowsRequest:
    position = SessionPosition(
        "s", 1, 0, 0, b"", np.array(TOKENS, dtype=np.uint32), SamplingFilters(**filters),
        seed=3, turn=0, output_start=3, draw_rule=DrawRule.DISTRIBUTION,
    )  # fmt: skip
    return RowsRequest(position, np.array([*TOKENS, *draft], dtype=np.uint32), len(draft) + 1, num_logprobs)


class Server:
    """Stands for the connection: notes requests and answers them as SGLang does."""

    def __init__(self, *answers: Mapping[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = list(answers)

    async def ask_pinned(self, path: str, body: Mapping[str, Any]) -> Any:
        assert path == "/generate"
        self.asked.append(json.loads(json.dumps(body)))
        if self._answers:
            return json.loads(json.dumps(self._answers.pop(0)))
        if not body.get("return_logprob"):
            return answer(8)
        row = [(-0.5 - place, 8 + place) for place in range(body["top_logprobs_num"])]
        return answer(8, [row] * (len(body["input_ids"]) - body["logprob_start_len"]))


def answer(token_id: int, rows: Sequence[Sequence[tuple[float, int]]] = (), **info: Any) -> dict[str, Any]:
    """Return an answer with a generated token.

    Args:
        token_id: the token.
        rows: logprob and id of the likeliest tokens of each position, the generated one last; () for no logprobs.
        info: further entries of `meta_info`.
    """
    meta_info: dict[str, Any] = {
        "id": "e37ee0c5",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": 5,
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": 1,
        "cached_tokens": 2,
        "e2e_latency": 0.01,
    }
    if rows:
        tops = [[[logprob, each, None] for logprob, each in row] or None for row in rows]
        own = {each: logprob for logprob, each in rows[-1]}.get(token_id, -9.0)
        meta_info |= {
            "input_token_logprobs": [[None, 7, None], *(row and row[0] for row in tops[:-1])],
            "output_token_logprobs": [[own, token_id, None]],
            "output_token_logprobs_length": 1,
            "input_top_logprobs": [None, *tops[:-1]],
            "output_top_logprobs": [tops[-1]],
        }
    return {"text": " w8", "output_ids": [token_id], "meta_info": meta_info | info}


def backend(server: Server) -> SglangBackend:
    shape = BackendShape("sglang", "SGLang 0.5.23", 24, "v", "m", 512, (1,), ())
    return SglangBackend(server, shape, 20)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECORDED)
async def test_requests_are_the_recorded_ones_and_have_sglangs_fields(name: str) -> None:
    filters, position, expected = RECORDED[name]
    asked = question(filters)
    for field, value in position.items():
        setattr(asked.position, field, value)
    server = Server()
    await backend(server).ask(asked)
    assert server.asked == expected
    for body in server.asked:
        assert all(GENERATE_FIELDS[field](value) for field, value in body.items())
        assert all(SAMPLING_FIELDS[field](value) for field, value in body["sampling_params"].items())


async def test_the_rows_of_a_prompt_are_read_after_the_empty_first_entry() -> None:
    rows = [[(-0.1, 3), (-2.5, 2)], [(-0.2, 9), (-3.0, 4)], [(-0.3, 8), (-2.0, 7)]]
    stated = await backend(Server(answer(8, rows))).ask(question({"temperature": 0.0}))
    assert [distribution.token_ids.tolist() for distribution in stated.distributions] == [[3], [9], [8]]
    assert stated.num_cached_tokens == 2


async def test_a_round_without_draft_tokens_has_the_empty_entry_alone() -> None:
    reply = answer(8, [[(-0.1, 8)]])
    assert reply["meta_info"]["input_top_logprobs"] == [None]
    stated = await backend(Server(reply)).ask(question({"temperature": 0.0}, draft=()))
    assert [distribution.token_ids.tolist() for distribution in stated.distributions] == [[8]]


async def test_a_law_of_top_k_comes_from_the_stated_tokens() -> None:
    rows = [[(-0.5, 3), (-1.5, 2), (-2.5, 6)]] * 3
    stated = await backend(Server(answer(3, rows))).ask(question({"temperature": 0.5, "top_k": 2}))
    weights = np.exp(np.array([-1.5, -0.5]) / 0.5)  # of the tokens 2 and 3
    for distribution in stated.distributions:
        assert distribution.token_ids.tolist() == [2, 3]
        np.testing.assert_allclose(distribution.probabilities, weights / weights.sum())


@pytest.mark.parametrize("num_logprobs", [0, 2])
async def test_logprobs_of_a_sampled_token_are_asked_for_greedily_by_its_id(num_logprobs: int) -> None:
    """SGLang's own logprobs of a sample have the temperature in them."""
    top = [(-0.1, 8), (-3.5, 2)][: num_logprobs or 1]
    raw = answer(8, [top], output_token_ids_logprobs=[[[-4.0, 17, None]]], input_token_ids_logprobs=[None])
    server = Server(answer(17), raw)
    (distribution,) = (await backend(server).ask(question({"temperature": 0.5}, num_logprobs, draft=()))).distributions
    assert server.asked == [
        sample([5, 6, 7], SEEDS[0]),
        greedy([5, 6, 7], num_logprobs or 1, 2, token_ids_logprob=[17]),
    ]
    assert all(GENERATE_FIELDS[field](value) for field, value in server.asked[1].items())
    assert distribution.token_ids.tolist() == [17]
    assert distribution.top is not None
    assert dict(zip(distribution.top.token_ids.tolist(), distribution.top.logits.tolist(), strict=True)) == {
        **{token_id: logprob for logprob, token_id in top}, 17: -4.0,
    }  # fmt: skip


@pytest.mark.parametrize("num_logprobs", [0, 3])
async def test_logprobs_of_a_sampled_text_are_the_models_own(num_logprobs: int) -> None:
    async with backend_system("sglang") as system:
        output = await system.coordinator.generate(request(temperature=0.6, seed=5, logprobs=num_logprobs))
    tokens = list(PROMPT)
    for detail, token_id in zip(output.details, output.token_ids, strict=True):
        logits = table_model().logits_after(tokens).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert detail.logprob == pytest.approx(logprobs[token_id], abs=1e-4)
        likeliest = np.argsort(-logprobs, kind="stable")[:num_logprobs].tolist()
        assert [top.token_id for top in detail.top_logprobs] == likeliest
        tokens.append(token_id)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"error": {"message": "busy"}}, "returned no token"),
        (answer(8), "0 rows of logprobs for 2 draft tokens"),
        (answer(8, [[(-0.1, 8)]] * 2), "1 rows of logprobs for 2 draft tokens"),
        (answer(8, [[(-0.1, 8)], [], [(-0.1, 8)]]), "not a list of logprobs"),
        (answer(8, [[(-0.1, 8)]] * 3, output_top_logprobs=[]), "no logprobs of its token"),
    ],
)
async def test_an_answer_of_another_shape_is_an_error(reply: Mapping[str, Any], message: str) -> None:
    with pytest.raises(Internal, match=message):
        await backend(Server(reply)).ask(question({"temperature": 0.0}))


async def test_the_longest_session_leaves_out_what_sglang_keeps_free(tmp_path: Path) -> None:
    """SGLang refuses prompts from `max_req_input_len` on, six tokens before the end of the model's context."""
    write_checkpoint(tmp_path)
    async with EngineServer(table_model()) as server:
        connection = Connection(server.url, timeout_s=20.0)
        opened = await open_sglang(connection, model=str(tmp_path), served_name="", max_context_tokens=None)
        assert opened.shape.max_context_tokens == server.options.max_model_len - 6
        await connection.close()


async def test_a_server_that_describes_itself_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path)

    async def describe(self: EngineServer) -> dict[str, str]:
        return {"version": "0.5.1"}

    monkeypatch.setattr(EngineServer, "_server_info", describe)
    async with EngineServer(table_model()) as server:
        connection = Connection(server.url, timeout_s=20.0)
        with pytest.raises(InvalidSetting, match="states no max_req_input_len in /server_info"):
            await open_sglang(connection, model=str(tmp_path), served_name="", max_context_tokens=None)
        await connection.close()
