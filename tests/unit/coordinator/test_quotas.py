"""Limits of one tenant, with a clock that the tests set."""

from __future__ import annotations

import pytest

from coordinator.admission.quotas import MAX_TENANTS, TenantQuotas, limits_over
from specdec.access.grants import Limits
from specdec.contract.errors import ResourceExhausted
from specdec.contract.tenant import SessionKey
from tests.support.clock import Clock

TTL_S = 100.0


def quotas_of(limits: Limits) -> tuple[TenantQuotas, Clock]:
    clock = Clock()
    return TenantQuotas(lambda tenant: limits, session_ttl_s=TTL_S, clock=clock), clock


def test_an_idle_session_counts_until_it_expires() -> None:
    quotas, clock = quotas_of(Limits(max_sessions=2))
    quotas.use_session(SessionKey("a", "s0"), is_new=True)
    clock.now_s += 60.0
    quotas.use_session(SessionKey("a", "s1"), is_new=True)
    with pytest.raises(ResourceExhausted) as full:
        quotas.use_session(SessionKey("a", "s2"), is_new=True)
    assert full.value.retry_after_s == pytest.approx(40.0)
    clock.now_s += 41.0
    quotas.use_session(SessionKey("a", "s2"), is_new=True)


def test_own_limits_take_the_place_of_the_usual_ones_one_by_one() -> None:
    usual = Limits(max_concurrent=2, max_sessions=5)
    own = Limits(max_concurrent=9, max_prompt_tokens=3)
    assert limits_over(own, usual) == Limits(9, None, None, 5, 3, None)


def test_the_sessions_of_only_so_many_tenants_are_remembered() -> None:
    quotas, _ = quotas_of(Limits(max_sessions=1))
    for number in range(MAX_TENANTS + 1):
        quotas.use_session(SessionKey(f"t{number}", "s"), is_new=True)
    with pytest.raises(ResourceExhausted):
        quotas.use_session(SessionKey("t1", "other"), is_new=True)
    quotas.use_session(SessionKey("t0", "other"), is_new=True)


def test_tokens_are_reserved_until_they_are_given_back() -> None:
    quotas, _ = quotas_of(Limits(max_reserved_tokens=100))
    quotas.check_reserved("a", 100)
    quotas.reserve("a", 70)
    quotas.reserve("a", 50)  # a resumption, which is never refused
    with pytest.raises(
        ResourceExhausted, match=r"100 reserved tokens: this request may reach 1, and others .* 120"
    ) as full:
        quotas.check_reserved("a", 1)
    assert full.value.retryable
    quotas.reserve("a", -70)
    quotas.check_reserved("a", 50)
    quotas.reserve("a", -50)
    with pytest.raises(ResourceExhausted) as never:
        quotas.check_reserved("a", 101)
    assert not never.value.retryable
