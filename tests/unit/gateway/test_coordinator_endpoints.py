"""The endpoint at which a gateway dials its coordinators: several are dialled over one family of addresses."""

from __future__ import annotations

import asyncio
import re

import pytest

from gateway.upstream import endpoint_of
from specdec.contract.errors import Unavailable


@pytest.mark.parametrize(
    ("coordinators", "endpoint"),
    [
        (["coordinator:50051"], "coordinator:50051"),
        (["10.0.0.5:50051", "10.0.0.6:50051"], "ipv4:10.0.0.5:50051,10.0.0.6:50051"),
        (["[fd00::5]:50051", "[fd00::6]:50051"], "ipv6:[fd00::5]:50051,[fd00::6]:50051"),
    ],
)
def test_several_coordinators_of_either_family_are_one_endpoint(coordinators: list[str], endpoint: str) -> None:
    assert asyncio.run(endpoint_of(coordinators)) == endpoint


@pytest.mark.parametrize(
    ("coordinators", "words"),
    [
        (["10.0.0.5:50051", "[fd00::6]:50051"], "have neither IPv4 nor IPv6 addresses all together"),
        (["10.0.0.5:50051", "nowhere.invalid:50051"], "'nowhere.invalid:50051' has no address"),
    ],
)
def test_coordinators_without_a_family_in_common_are_refused_by_name(coordinators: list[str], words: str) -> None:
    with pytest.raises(Unavailable, match=re.escape(words)):
        asyncio.run(endpoint_of(coordinators))
