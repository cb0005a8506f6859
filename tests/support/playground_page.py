"""The playground's page as a user has it: fill the form, generate, read what the page shows."""

from __future__ import annotations

from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

PROMPT = "def read_lines(path"
_SOURCE_OF = "tokens => tokens.map((token) => token.classList[1])"


def fill(page: Page, prompt: str = PROMPT, **fields: str) -> None:
    """Fill the form: a greedy request with drafts of three tokens, and `fields` by their names."""
    if not page.locator("#options").evaluate("details => details.open"):
        page.locator("#options > summary").click()
    page.locator("#input").fill(prompt)
    for name, value in {"temperature": "0", "gamma": "3", "max_tokens": "48", **fields}.items():
        page.locator(f"[name={name}]").fill(value)


def generate(page: Page) -> None:
    """Start the request and wait for the end of its stream."""
    page.locator("#generate").click()
    expect(page.locator("#status")).to_contain_text("Finished")


def output(page: Page, pane: str = "main") -> str:
    """Return the text of a pane's last turn."""
    return page.locator(f"#{pane}-output .tokens").last.evaluate("tokens => tokens.textContent")


def sources(page: Page, pane: str = "main") -> list[str]:
    """Return the source of each token in a pane."""
    return page.locator(f"#{pane}-output .token").evaluate_all(_SOURCE_OF)


def numbers(page: Page, selector: str) -> list[int]:
    """Return the numbers that the elements show."""
    return [int(text) for text in page.locator(selector).all_text_contents()]


def serious(page: Page) -> list[dict[str, Any]]:
    """Return axe's findings that keep people from using the page, with the elements they are about."""
    return [
        {"id": finding["id"], "nodes": [node["html"] for node in finding["nodes"]]}
        for finding in Axe().run(page).response["violations"]
        if finding["impact"] in ("serious", "critical")
    ]
