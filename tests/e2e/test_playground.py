"""The playground in Chromium, against the gateway of a real `specdec up --http` with the demo pair.

With `SPECDEC_SCREENSHOTS=FOLDER` pictures of the page are written to FOLDER.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.support.gateway_system import System
from tests.support.playground_page import (
    CHROMIUM,
    NO_CHROMIUM,
    PHONE_WIDTH,
    PROMPT,
    STEP_TIMEOUT_MS,
    fill,
    generate,
    numbers,
    opened,
    output,
    page,
    relay_of_beginnings,
    screenshot,
    serious,
    sources,
    tab,
    url,
)
from tests.support.up_rig import ENVIRON

__all__ = ["page", "tab", "url"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

SOURCES = ("accepted", "corrected", "bonus", "target")
API_KEY = "playground-key"

expect.set_options(timeout=STEP_TIMEOUT_MS)


@pytest.fixture(scope="module")
def held_url(demo: System) -> Iterator[str]:
    """The page behind a relay that passes the beginning of an answer, so no text ends before the page leaves it."""
    with relay_of_beginnings(demo.http) as address:
        yield f"http://{address}/"


@functools.cache
def complete(url: str, max_tokens: int) -> str:
    """Return the greedy continuation of the prompt, in one answer without a stream."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": max_tokens, "speculation": {"gamma": 3}}
    request = urllib.request.Request(
        f"{url}v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"]


def test_a_prompt_becomes_tokens_that_are_marked_by_their_source(page: Page, url: str) -> None:
    fill(page)
    generate(page)
    assert output(page) == complete(url, 48)
    assert len(sources(page)) == 48
    assert {"accepted", "corrected"} <= set(sources(page)) <= set(SOURCES)
    styles = page.locator(".legend .token").evaluate_all(
        "tokens => tokens.map((token) => getComputedStyle(token).textDecoration.replace(/rgb.*$/, ''))"
    )
    assert len(set(styles)) == len(styles), "each source can be told without its colour"
    expect(page.locator("#status")).to_contain_text("48 tokens")
    expect(page.locator("#main-rate")).to_have_text(re.compile(r"[\d.]+ tokens/s"))


def test_the_page_comes_with_a_strict_content_policy(url: str) -> None:
    with urllib.request.urlopen(url) as page:
        assert page.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src")


def test_rounds_and_positions_add_up_to_the_tokens(page: Page) -> None:
    fill(page)
    generate(page)
    drafted, accepted, corrected = (numbers(page, f"#rounds tbody td:nth-child({column})") for column in (2, 3, 4))
    assert sum(accepted) == sources(page).count("accepted")
    assert sum(corrected) == sources(page).count("corrected")
    assert max(drafted) == 3
    assert all(kept <= tested for kept, tested in zip(accepted, drafted, strict=True))
    counts = page.locator("#positions tbody td:nth-child(3)").all_text_contents()
    assert len(counts) == 3
    assert sum(int(text.split(" of ")[0]) for text in counts) == sum(accepted)
    assert sum(int(text.split(" of ")[1]) for text in counts) == sum(drafted)
    screenshot(page, "light", whole=True)


def test_pointer_and_keyboard_show_p_and_q_of_a_token(page: Page) -> None:
    fill(page, temperature="1")
    generate(page)
    card = page.locator("#token-card")
    page.locator("#main-output .accepted").first.hover()
    expect(card).to_contain_text(re.compile(r"p, target\s*[\d.e-]+\s*q, draft\s*[\d.e-]+"))
    page.locator("h1").hover()
    expect(card).to_be_hidden()

    page.set_viewport_size({"width": 1280, "height": 300})  # the focus scrolls the page
    page.locator(".skip").focus()
    while not page.evaluate("document.activeElement.classList.contains('token')"):
        page.keyboard.press("Tab")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    expect(card).to_contain_text("p, target")
    expect(card).to_be_in_viewport()
    page.keyboard.press("ArrowRight")
    focused = page.locator("#main-output .token:focus")
    assert focused.evaluate("token => token === document.querySelectorAll('#main-output .token')[1]")
    assert focused.get_attribute("aria-describedby") == "token-card"
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_a_comparison_runs_both_streams_at_once_and_finds_the_same_greedy_text(page: Page, url: str) -> None:
    events: list[str] = []
    page.on("request", lambda request: request.method == "POST" and events.append("begun"))
    fill(page, max_tokens="200")
    page.locator("[name=compare]").check()
    page.on("requestfinished", lambda request: request.method == "POST" and events.append("ended"))
    page.locator("#generate").click()
    expect(page.locator("#comparison")).to_contain_text("Both texts are the same.")
    assert events[:2] == ["begun", "begun"]
    expect(page.locator("#comparison")).to_contain_text(re.compile(r"Speculation was [\d.]+ times as fast"))
    assert output(page, "main") == output(page, "other") == complete(url, 200)
    assert set(sources(page, "other")) == {"target"}
    expect(page.locator("#other-rate")).to_contain_text("tokens/s")


def test_a_stream_goes_on_after_the_page_was_reloaded(tab: Page, url: str, held_url: str) -> None:
    resumed_after: list[str] = []
    with opened(tab, held_url) as page:
        page.on("request", lambda request: resumed_after.append(request.headers.get("last-event-id", "")))
        fill(page, max_tokens="600")
        page.locator("#generate").click()
        expect(page.locator("#main-output .token").nth(8)).to_be_attached()
        page.reload()
        expect(page.locator("#status")).to_contain_text("Finished")
        assert output(page) == complete(url, 600)
        (index,) = [int(event_id.split(":")[1]) for event_id in resumed_after if event_id]
        assert 8 <= index < 600, "the reload came in the middle of the stream"


@pytest.mark.parametrize("event_id", ["another:3", "s-of-this-test:x", "s-of-this-test:-1"])
def test_an_event_id_that_is_none_of_the_session_is_refused(url: str, event_id: str) -> None:
    headers = {"Accept": "text/event-stream", "Last-Event-ID": event_id}
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        urllib.request.urlopen(urllib.request.Request(f"{url}v1/sessions/s-of-this-test", headers=headers))
    assert json.load(refused.value)["error"]["param"] == "Last-Event-ID"


def test_a_stopped_stream_is_continued_on_demand(tab: Page, url: str, held_url: str) -> None:
    with opened(tab, held_url) as page:
        fill(page, max_tokens="600")
        page.locator("#generate").click()
        expect(page.locator("#main-output .token").nth(8)).to_be_attached()
        page.locator("#stop").click()
        expect(page.locator("#status")).to_contain_text("Stopped after")
        page.locator("#resume").click()
        expect(page.locator("#status")).to_contain_text("Finished")
        assert output(page) == complete(url, 600)


def test_an_error_is_told_in_words_and_the_next_request_works(page: Page) -> None:
    fill(page, "word " * 4000)
    page.locator("#generate").click()
    expect(page.get_by_role("alert")).to_contain_text("(context_length_exceeded)")
    screenshot(page, "error")
    fill(page)
    generate(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_gateway_with_keys_is_used_after_the_key_was_given(tab: Page, demo: System) -> None:
    command = [sys.executable, "-m", "gateway", "--listen", "127.0.0.1:0", "--coordinator", demo.grpc]
    gateway = subprocess.Popen(
        [*command, "--api-key", API_KEY, "--log-format", "json"], stderr=subprocess.PIPE, text=True, env=ENVIRON
    )
    try:
        assert gateway.stderr is not None
        address = next(found[1] for line in gateway.stderr if (found := re.search(r'"advertised": "([\d.:]+)"', line)))
        with opened(tab, f"http://{address}/") as page:
            expect(page.get_by_role("alert")).to_contain_text("key")
            page.get_by_label("API key", exact=True).fill("wrong")
            page.get_by_role("button", name="Use this key").click()
            expect(page.locator("#key-form")).to_be_visible()
            page.get_by_label("API key", exact=True).fill(API_KEY)
            page.get_by_role("button", name="Use this key").click()
            expect(page.locator("#key-form")).to_be_hidden()
            fill(page)
            generate(page)
            page.locator("#code > summary").click()
            expect(page.locator("#curl-code")).to_contain_text("Bearer $SPECDEC_API_KEY")
            assert API_KEY not in page.locator("#code").inner_text()
    finally:
        gateway.send_signal(signal.SIGTERM)
        gateway.communicate()


@pytest.mark.parametrize(("kind", "language"), [("Prompt", "curl"), ("Chat", "Python")])
def test_the_copied_code_makes_the_same_request(page: Page, kind: str, language: str) -> None:
    page.get_by_label(kind, exact=True).and_(page.get_by_role("radio")).check()
    fill(page, 'say("it\'s")', top_k="5")
    page.locator("#code > summary").click()
    page.get_by_role("button", name=f"Copy as {language}").click()
    expect(page.locator("#status")).to_have_text("Copied.")
    code = page.evaluate("navigator.clipboard.readText()")
    generate(page)
    assert (text_of_curl if language == "curl" else printed_by_python)(code) == output(page)


def text_of_curl(command: str) -> str:
    """Run a copied curl command; return the text of the stream that it prints."""
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    chunks = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def printed_by_python(program: str) -> str:
    """Run a copied Python program; return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRON, check=True
    ).stdout


def test_a_phone_shows_the_page_without_scrolling_sideways(tab: Page, url: str) -> None:
    with opened(tab, url, width=PHONE_WIDTH, height=740) as page:
        fill(page)
        page.locator("[name=compare]").check()
        page.locator("#code > summary").click()
        page.locator("#generate").click()
        expect(page.locator("#comparison")).not_to_be_empty()
        page.locator("#main-output .token").last.hover()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE_WIDTH
        page.locator("#code > summary").click()
        page.locator("#options > summary").click()
        screenshot(page, "phone", whole=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(tab: Page, url: str, scheme: str) -> None:
    with opened(tab, url, scheme=scheme) as page:
        fill(page, max_tokens="64")
        page.locator("[name=compare]").check()
        page.locator("#generate").click()
        expect(page.locator("#comparison")).not_to_be_empty()
        screenshot(page, f"compare-{scheme}")
        page.locator("#code > summary").click()
        page.locator("#key-form").evaluate("form => form.hidden = false")
        page.locator("#error").evaluate("error => { error.hidden = false; error.textContent = 'An error.'; }")
        page.locator("#main-output .token").first.focus()
        assert serious(page) == []


def test_the_chosen_theme_overrides_the_system_and_is_remembered(tab: Page, url: str) -> None:
    with opened(tab, url, scheme="light") as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(ground)
        page.get_by_label("Theme").select_option("dark")
        assert page.evaluate(ground) != before
        assert serious(page) == []
        page.reload()
        assert page.evaluate(ground) != before


def test_axe_would_notice_a_pale_text(page: Page) -> None:
    page.evaluate("document.querySelector('#server').style.color = '#cccccc'")
    assert [finding["id"] for finding in serious(page)] == ["color-contrast"]
