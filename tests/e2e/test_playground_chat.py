"""Chats in the playground, in Chromium: conversations, sessions, and answers as Markdown."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.playground_page import (
    CHROMIUM,
    NO_CHROMIUM,
    PHONE_WIDTH,
    STEP_TIMEOUT_MS,
    fill,
    generate,
    opened,
    page,
    screenshot,
    serious,
    tab,
    url,
)

__all__ = ["page", "tab", "url"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

expect.set_options(timeout=STEP_TIMEOUT_MS)


def test_a_conversation_continues_and_its_session_can_be_opened_and_deleted(page: Page, url: str) -> None:
    page.get_by_label("Chat").check()
    for number, message in enumerate(("Count the words of a file.", "Now the lines."), 1):
        fill(page, message, max_tokens="16")
        generate(page)
        expect(page.locator("#main-output .turn")).to_have_count(number)
        page.locator("#status").evaluate("status => status.textContent = ''")
    texts = page.locator("#main-output .tokens").all_text_contents()

    page.reload()
    expect(page.locator("#status")).to_contain_text("The server holds this session")
    page.locator("#new-session").click()
    expect(page.locator("#main-output .turn")).to_have_count(0)
    page.get_by_role("button", name="Open session Count the words").click()
    assert page.locator("#main-output .tokens").all_text_contents() == texts
    session_id = page.evaluate("sessionStorage.getItem('specdec.open')")
    page.get_by_role("button", name="Delete session Count the words").click()
    expect(page.locator("#sessions")).to_have_text("None yet.")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}v1/sessions/{session_id}")


def chat_requests(page: Page) -> list[dict[str, Any]]:
    """Return a list that gets the body of each chat request of the page."""
    bodies: list[dict[str, Any]] = []
    page.on(
        "request", lambda request: request.url.endswith("/chat/completions") and bodies.append(request.post_data_json)
    )
    return bodies


def test_a_sent_message_leaves_the_box_and_its_request_has_it_once(page: Page) -> None:
    bodies = chat_requests(page)
    page.get_by_label("Chat").check()
    fill(page, "Count the words.", max_tokens="8")
    page.locator("[name=system]").fill("Be brief.")
    page.locator("[name=stop_strings]").fill("\n\n\nEND OF\n###")
    page.locator("#code > summary").click()
    page.locator("#input").press("Shift+Enter")
    page.locator("#input").press("Backspace")
    page.locator("#input").press("Enter")
    expect(page.locator("#status")).to_contain_text("Finished")
    expect(page.locator("#input")).to_have_value("")
    (body,) = bodies
    messages = [("system", "Be brief."), ("user", "Count the words.")]
    assert [(message["role"], message["content"]) for message in body["messages"]] == messages
    assert body["stop"] == ["END OF", "###"]
    assert page.locator("#curl-code").inner_text().count("Count the words.") == 1
    page.locator("#input").fill("Again.")
    page.locator("[name=max_tokens]").press("Control+Enter")  # from any field
    expect(page.locator("#main-output .turn")).to_have_count(2)
    assert [message["content"] for message in bodies[1]["messages"]][::3] == ["Be brief.", "Again."]


def test_a_message_that_fails_comes_back_to_the_box_and_leaves_the_conversation(page: Page) -> None:
    bodies = chat_requests(page)
    page.get_by_label("Chat").check()
    for message in ("First.", "word " * 4000, "Third."):
        fill(page, message, max_tokens="8")
        page.locator("#generate").click()
        expect(page.locator("#status")).to_have_text(re.compile("Finished|failed"))
        page.locator("#status").evaluate("status => status.textContent = ''")
        if len(message) > 100:
            expect(page.get_by_role("alert")).to_be_visible()
            expect(page.locator("#input")).to_have_value(message)
            expect(page.locator("#main-output .turn")).to_have_count(1)
    expect(page.locator("#main-output .turn")).to_have_count(2)
    users = [message["content"] for message in bodies[-1]["messages"] if message["role"] == "user"]
    assert users == ["First.", "Third."]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", PHONE_WIDTH)])
def test_an_answer_is_shown_as_its_markdown_or_as_its_tokens(tab: Page, url: str, scheme: str, width: int) -> None:
    with opened(tab, url, scheme=scheme, width=width) as page:
        page.get_by_label("Chat").check()
        for number, message in enumerate(("Write a function that reads the lines of a file.", "Now its tests."), 1):
            fill(page, message, max_tokens="40")
            page.locator("#generate").click()
            expect(page.locator("#main-output .turn")).to_have_count(number)
            expect(page.locator("#status")).to_contain_text("Finished")
            page.locator("#status").evaluate("status => status.textContent = ''")
        markup, marked = page.locator("#main-output .markup").last, page.locator("#main-output .token").last
        expect(markup).to_be_visible()
        expect(marked).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert serious(page) == []
        screenshot(page, f"chat-{scheme if width > PHONE_WIDTH else 'phone'}", whole=width == PHONE_WIDTH)
        page.get_by_label("Mark tokens").check()
        expect(markup).to_be_hidden()
        expect(marked).to_be_visible()


MARKDOWN = [
    ("# A\n**b** *c* `d`", "<h5>A</h5><p><strong>b</strong> <em>c</em> <code>d</code></p>"),
    ("- a\n  - b\n1. c", "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li></ul><ol start=\"1\"><li><p>c</p></li></ol>"),
    ("```py\nx = '<b>'", '<pre tabindex="0"><code>x = \'&lt;b&gt;\'</code></pre>'),
    ("|a|b|\n|-|-|\n|1|2|",
     "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"),
    ("> q", "<blockquote><p>q</p></blockquote>"),
    ("2 * 3 * 4 in snake_case_name", "<p>2 * 3 * 4 in snake_case_name</p>"),
    ("<img src=x onerror=alert(1)><script>alert(1)</script>",
     "<p>&lt;img src=x onerror=alert(1)&gt;&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
    ("[a](javascript:void) [b](data:text/html,x) ![c](//x/y)", "<p>a b c</p>"),
    ('[a](https://x.y/z"onclick="b)', '<p><a href="https://x.y/z&quot;onclick=&quot;b" target="_blank" '
     'rel="noopener noreferrer">a</a></p>'),
    ("x" + "`" * 50_000, f"<p>x{'`' * 50_000}</p>"),
    ("> " * 5000, ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "markup"), MARKDOWN, ids=[text[:20] for text, _ in MARKDOWN])
def test_markdown_becomes_elements_and_markup_in_an_answer_stays_text(page: Page, text: str, markup: str) -> None:
    rendered = page.evaluate(
        "async (text) => (await import('/markdown.js')).renderMarkdown(text).map((node) => node.outerHTML).join('')",
        text,
    )
    assert rendered == markup or (not markup and "<script" not in rendered)
