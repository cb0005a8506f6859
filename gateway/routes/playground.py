"""The playground: a page at / and the files beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

_FILES = Path(__file__).parents[1] / "playground"
_PAGE = "index.html"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    """Return one route for each file. A route for every path would hide which methods the other routes take."""
    routes = APIRouter()
    for path in sorted(_FILES.iterdir()):
        name = "" if path.name == _PAGE else path.name
        routes.add_route(f"/{name}", _sender(path), methods=["GET"], include_in_schema=False)
    return routes


def _sender(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return FileResponse(path, headers=_HEADERS)

    return send
