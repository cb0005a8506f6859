"""Debian's Chromium under Playwright, and the page of the playground with what is watched on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Error, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NO_CHROMIUM = "needs the program chromium on the PATH (`make browser`)"
#: Folder that screenshots are written to; unset: none are made.
SCREENSHOTS = os.environ.get("SPECDEC_SCREENSHOTS", "")
#: Limit on one step of a page, for machines under load. A step that succeeds takes as long as it needs.
STEP_TIMEOUT_MS = 120_000
#: A file of the page, shown as text: while it is open, nothing of the page runs and writes to the browser's storage.
NO_SCRIPT = "theme.js"


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
def tab_of(browser: Browser) -> Iterator[Page]:
    """Return a tab for tests that use it one after another: to start one costs more than to show a page."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(STEP_TIMEOUT_MS)
    yield context.new_page()
    context.close()


@contextmanager
def opened(tab: Page, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Page]:
    """Open a page as for the first time. A script that fails, or that the content policy refuses, fails the test."""
    problems: list[str] = []

    def note_error(error: Error) -> None:
        problems.append(str(error))

    def note_message(message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            problems.append(message.text)

    tab.set_viewport_size({"width": width, "height": height})
    tab.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    tab.mouse.move(0, 0)
    tab.goto(f"{url}{NO_SCRIPT}")
    tab.evaluate("localStorage.clear(); sessionStorage.clear()")
    tab.on("pageerror", note_error)
    tab.on("console", note_message)
    try:
        tab.goto(url)
        yield tab
        assert not problems
    finally:
        tab.remove_listener("pageerror", note_error)
        tab.remove_listener("console", note_message)


def screenshot(page: Page, name: str, *, whole: bool = False) -> None:
    """Write a picture of the page where screenshots are wanted."""
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png", full_page=whole)
