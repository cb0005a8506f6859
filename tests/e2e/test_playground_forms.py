"""Structured output and tools in the playground, in Chromium: forced tokens, calls, and forms that cannot be used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from playwright.sync_api import Page, expect

from tests.support.playground_page import (
    CHROMIUM,
    NO_CHROMIUM,
    STEP_TIMEOUT_MS,
    fill,
    generate,
    opened,
    output,
    screenshot,
    serious,
    sources,
    tab,
)

__all__ = ["tab"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Forecast", "parameters": SCHEMA}
ONE_CALL = {
    "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none",
}  # fmt: skip
QUESTION = "What is the weather in Paris?"

expect.set_options(timeout=STEP_TIMEOUT_MS)


@pytest.fixture
def page(tab: Page, tool_url: str) -> Iterator[Page]:
    with opened(tab, f"{tool_url}/") as shown:
        yield shown


def fill_form(page: Page, form: Any) -> None:
    page.locator("[name=form]").fill(form if isinstance(form, str) else json.dumps(form))


def test_text_of_a_schema_shows_which_tokens_its_form_forces(page: Page) -> None:
    fill(page)
    fill_form(page, SCHEMA)
    generate(page)
    jsonschema.validate(json.loads(output(page)), SCHEMA)
    assert {"forced", "accepted"} <= set(sources(page))
    expect(page.locator("#main-output .form-name")).to_have_text("Constrained to JSON of a schema.")
    page.locator("#main-output .forced").first.hover()
    expect(page.locator("#token-card")).to_contain_text("the only one that the form of the answer allows")
    screenshot(page, "schema")
    assert serious(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_call_is_shown_with_its_name_and_arguments(tab: Page, tool_url: str, scheme: str) -> None:
    with opened(tab, f"{tool_url}/", scheme=scheme) as page:
        page.get_by_label("Chat").check()
        fill(page, QUESTION, max_tokens="120")
        fill_form(page, ONE_CALL)
        generate(page)
        call = page.get_by_role("group", name="Call of get_weather")
        jsonschema.validate(json.loads(call.locator("pre").inner_text()), SCHEMA)
        expect(page.locator("#main-output .markup")).not_to_contain_text("tool_call")
        assert serious(page) == []
        page.evaluate("scrollTo(0, 0)")
        screenshot(page, f"tools-{scheme}")
        page.get_by_label("Mark tokens").check()
        assert sources(page).count("forced") > 10
        page.reload()
        expect(page.locator("#main-output .call")).to_have_text(re.compile("get_weather.*Paris|get_weather.*Rome"))


def test_the_next_message_sends_the_call_back(page: Page) -> None:
    bodies: list[dict[str, Any]] = []
    page.on(
        "request", lambda request: request.url.endswith("/chat/completions") and bodies.append(request.post_data_json)
    )
    page.get_by_label("Chat").check()
    fill_form(page, ONE_CALL)
    for number in (1, 2):
        fill(page, QUESTION, max_tokens="120")
        page.locator("#generate").click()
        expect(page.locator("#main-output .call")).to_have_count(number)
        expect(page.locator("#status")).to_contain_text("Finished")
        page.locator("#status").evaluate("status => status.textContent = ''")
    assert bodies[0]["tools"] == [{"type": "function", "function": WEATHER}]
    (call,) = bodies[1]["messages"][1]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


@pytest.mark.parametrize(
    ("form", "said"), [("{", "not JSON"), ("3", "object or a list"), ([WEATHER], "Chat"), ({"tools": 1}, "Chat")]
)
def test_a_form_that_cannot_be_used_is_told_before_anything_is_sent(page: Page, form: Any, said: str) -> None:
    sent: list[str] = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.url))
    fill(page)
    fill_form(page, form)
    page.locator("#generate").click()
    assert re.search(said, page.locator("[name=form]").evaluate("field => field.validationMessage"))
    assert not sent
