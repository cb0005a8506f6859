"""The playground's page in Debian's Chromium, as a user has it: fill the form, generate, read what the page shows."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, expect, sync_playwright

from tests.support.gateway_system import System

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NO_CHROMIUM = "needs the program chromium on the PATH (`make browser`)"
#: Folder that screenshots are written to; unset: none are made.
SCREENSHOTS = os.environ.get("SPECDEC_SCREENSHOTS", "")
#: Limit on one step of a page, for machines under load. A step that succeeds takes as long as it needs.
STEP_TIMEOUT_MS = 120_000
PHONE_WIDTH = 360
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


#: A few dozen events of a stream with their provenance; the gateway goes on for some hundred tokens and then waits.
_PASSED_BYTES = 32 * 1024
_PIECE_BYTES = 64 * 1024


class _Relay(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        host, _, port = upstream.rpartition(":")
        self.upstream = (host, int(port))


class _Connection(socketserver.BaseRequestHandler):
    """A client's connection and the one to the gateway, which end together."""

    server: _Relay

    def handle(self) -> None:
        with socket.socket() as gateway, contextlib.suppress(ConnectionError):
            # The kernel takes little for the relay, so that the gateway notices that nothing is read.
            gateway.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PASSED_BYTES)
            gateway.connect(self.server.upstream)
            passed = sys.maxsize
            while True:
                ready, _, _ = select.select([self.request, *([gateway] if passed else [])], [], [])
                source, sink, most = (self.request, gateway, _PIECE_BYTES)
                if self.request not in ready:
                    source, sink, most = (gateway, self.request, min(passed, _PIECE_BYTES))
                if not (piece := source.recv(most)):
                    return
                if source is gateway:
                    passed -= len(piece)
                elif piece.startswith(b"POST "):
                    passed = _PASSED_BYTES
                sink.sendall(piece)


@contextlib.contextmanager
def relay_of_beginnings(upstream: str) -> Iterator[str]:
    """Return the address of a relay to HOST:PORT. It passes 32 KiB of an answer to POST."""
    with _Relay(upstream) as relay:
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{relay.server_address[1]}"
        finally:
            relay.shutdown()


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


@pytest.fixture(scope="module")
def url(demo: System) -> str:
    """Address of the page of the demo pair."""
    return f"http://{demo.http}/"


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """Tab that the tests of a file use one after another."""
    with chromium() as browser, tab_of(browser) as opened_tab:
        yield opened_tab


@pytest.fixture
def page(tab: Page, url: str) -> Iterator[Page]:
    """The page, as a user sees it for the first time."""
    with opened(tab, url) as shown:
        yield shown
