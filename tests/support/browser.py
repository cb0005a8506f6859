"""Debian's Chromium under Playwright, and the page of the playground with what is watched on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NO_CHROMIUM = "needs the program chromium on the PATH (`make browser`)"
#: Folder that screenshots are written to; unset: none are made.
SCREENSHOTS = os.environ.get("SPECDEC_SCREENSHOTS", "")
#: Limit on one step of a page, for machines under load. A step that succeeds takes as long as it needs.
STEP_TIMEOUT_MS = 120_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the system's Chromium without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light"
) -> Iterator[Page]:
    """Open a page in a fresh profile. A script that fails, or that the content policy refuses, fails the test."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        permissions=["clipboard-read", "clipboard-write"],
    )
    context.set_default_timeout(STEP_TIMEOUT_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: "Content Security Policy" in message.text and problems.append(message.text))
    try:
        page.goto(url)
        yield page
        assert not problems
    finally:
        context.close()


def screenshot(page: Page, name: str, *, whole: bool = False) -> None:
    """Write a picture of the page where screenshots are wanted."""
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png", full_page=whole)
