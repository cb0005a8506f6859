"""Checks of the clocks of services, from the date in the answers of their metrics ports."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime

from specdec.cli.checks.finding import Finding, warn
from specdec.cli.checks.redis_checks import clock_finding
from specdec.settings.addresses import split_address

_TIMEOUT_S = 3.0
#: A date in HTTP has whole seconds.
_DATE_RESOLUTION_S = 1.0


def check_clocks(addresses: Iterable[str]) -> Iterator[Finding]:
    """Compare the clock of each service with this machine's.

    Args:
        addresses: HOST:PORT of metrics ports, or of other ports that answer HTTP.
    """
    for address in addresses:
        skew_s = _skew_s(address)
        if skew_s is None:
            yield warn("clock", f"{address} states no date", "look at the service's --metrics and its log")
        else:
            yield clock_finding(f"{address} is", skew_s, uncertain_s=_DATE_RESOLUTION_S)


def _skew_s(address: str) -> float | None:
    """Return the other clock minus ours, to half a second; None if the port gives no date."""
    connection = http.client.HTTPConnection(*split_address(address), timeout=_TIMEOUT_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        asked_s = time.time()
        connection.request("HEAD", "/metrics")
        date = connection.getresponse().getheader("Date")
        if date is not None:
            shown_s = parsedate_to_datetime(date).timestamp() + _DATE_RESOLUTION_S / 2
            return shown_s - (asked_s + time.time()) / 2
    return None
