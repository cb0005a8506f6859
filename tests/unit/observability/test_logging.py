"""Log records carry ids, as JSON and as text."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest

from specdec.observability.logging import ID_NAMES, bind, bind_task, configure_logging
from tests.support.log_stream import lines, stream

__all__ = ["stream"]

log = logging.getLogger("specdec.test")


def test_a_json_record_is_one_line_with_ids_and_extra_fields(stream: io.StringIO) -> None:
    configure_logging("json", "info", service="draft", stream=stream)
    with bind(request_id="r", session_id="s"), bind(epoch=3, session_id="t"):
        log.info("two\nlines %d", 5, extra={"address": "a:1"})
    log.info("afterwards")
    record, later = lines(stream)
    assert record["message"] == "two\nlines 5"
    assert (record["service"], record["level"], record["logger"]) == ("draft", "info", "specdec.test")
    assert (record["request_id"], record["session_id"], record["epoch"]) == ("r", "t", 3)
    assert record["address"] == "a:1"
    assert not later.keys() & set(ID_NAMES)


def test_a_traceback_is_part_of_the_record(stream: io.StringIO) -> None:
    configure_logging("json", "info", service="draft", stream=stream)
    try:
        raise KeyError("missing")
    except KeyError:
        log.exception("failed")
    (record,) = lines(stream)
    assert "KeyError: 'missing'" in record["traceback"]


def test_records_of_libraries_about_malformed_requests_are_one_a_second_without_traceback(stream: io.StringIO) -> None:
    configure_logging("json", "info", service="draft", stream=stream)
    for name, words in (("grpc._cython.cygrpc", "Invalid encoding on %s"), ("uvicorn.error", "Invalid HTTP request.")):
        for number in range(500):
            try:
                raise ValueError(number)
            except ValueError:
                arguments = (b"\xff",) if "%s" in words else ()
                logging.getLogger(name).exception(words, *arguments)
        logging.getLogger(name).error("another")
    records = lines(stream)
    assert [record["message"] for record in records if record["level"] == "error"] == ["another", "another"]
    assert not any("traceback" in record for record in records)
    assert len(records) < 100


def test_text_records_name_their_ids(stream: io.StringIO) -> None:
    configure_logging("text", "debug", service="draft", stream=stream)
    with bind(round_id=9):
        log.debug("drafted", extra={"num_draft_tokens": 4})
    assert stream.getvalue().endswith("DEBUG specdec.test drafted round_id=9 num_draft_tokens=4\n")


def test_records_below_the_level_are_not_written(stream: io.StringIO) -> None:
    configure_logging("json", "warning", service="draft", stream=stream)
    log.info("unseen")
    log.warning("seen")
    assert [record["message"] for record in lines(stream)] == ["seen"]


async def test_tasks_inherit_ids_and_keep_their_own(stream: io.StringIO) -> None:
    configure_logging("json", "info", service="draft", stream=stream)

    async def work(name: str) -> None:
        with bind(session_id=name):
            await asyncio.sleep(0)
            log.info("working")

    with bind(request_id="r"):
        await asyncio.gather(work("a"), work("b"))
    assert sorted((record["request_id"], record["session_id"]) for record in lines(stream)) == [("r", "a"), ("r", "b")]


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt"), bind(prompt="secret"):
        pass


def test_attributes_that_a_library_adds_to_every_record_are_not_shown(stream: io.StringIO) -> None:
    configure_logging("text", "debug", service="draft", stream=stream)
    log.debug("drafted", extra={"num_draft_tokens": 4, "_stamp_ns": 5})
    assert stream.getvalue().endswith("DEBUG specdec.test drafted num_draft_tokens=4\n")


async def test_ids_that_are_bound_to_a_task_stay_in_it_and_in_the_tasks_that_it_starts(stream: io.StringIO) -> None:
    configure_logging("json", "info", service="coordinator", stream=stream)

    async def report(name: str) -> None:
        log.info(name)

    async def serve() -> None:
        bind_task(tenant="acme")
        log.info("in the task")
        await asyncio.create_task(report("in a task of the task"))

    await asyncio.create_task(serve())
    log.info("outside")
    assert [(record["message"], record.get("tenant")) for record in lines(stream)] == [
        ("in the task", "acme"), ("in a task of the task", "acme"), ("outside", None),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="colour is not one of"):
        bind_task(colour="red")
