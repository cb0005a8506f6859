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


def refusal(
    quotas: TenantQuotas, tenant: str = "a", *, num_active: int = 0, is_resumption: bool = False
) -> ResourceExhausted | None:
    try:
        quotas.begin(tenant, num_active, is_resumption=is_resumption)
    except ResourceExhausted as error:
        return error
    return None


def test_requests_per_minute_are_given_back_evenly_and_the_refusal_says_when() -> None:
    quotas, clock = quotas_of(Limits(max_requests_per_minute=6))
    for _ in range(6):
        assert refusal(quotas) is None
    error = refusal(quotas)
    assert error is not None
    assert error.retry_after_s == pytest.approx(10.0)
    assert refusal(quotas, "b") is None
    clock.now_s += 9.9
    assert refusal(quotas) is not None
    clock.now_s += 0.2
    assert refusal(quotas) is None
    assert refusal(quotas) is not None
    quotas.take_back("a")  # the request before found no slot
    assert refusal(quotas) is None


def test_a_resumption_counts_among_the_streams_alone() -> None:
    quotas, _ = quotas_of(Limits(max_concurrent=2, max_requests_per_minute=1, max_tokens_per_minute=10))
    assert refusal(quotas, num_active=1, is_resumption=True) is None
    quotas.count_tokens("a", 100)  # of a tenant whose requests began at another coordinator
    assert refusal(quotas, num_active=1, is_resumption=True) is None
    assert refusal(quotas, num_active=2, is_resumption=True) is not None
    assert refusal(quotas) is not None


def test_tokens_beyond_the_limit_are_made_up_for_before_the_next_request() -> None:
    quotas, clock = quotas_of(Limits(max_tokens_per_minute=600))
    assert refusal(quotas) is None
    quotas.count_tokens("a", 1199)  # one long stream
    error = refusal(quotas)
    assert error is not None
    assert error.retry_after_s == pytest.approx(60.0)
    clock.now_s += 61.0
    assert refusal(quotas) is None
    clock.now_s += 3600.0
    quotas.count_tokens("a", 600)
    assert refusal(quotas) is not None  # nothing is saved up beyond a minute


def test_an_idle_session_counts_until_it_expires() -> None:
    quotas, clock = quotas_of(Limits(max_sessions=2))
    assert refusal(quotas) is None
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


def test_only_so_many_tenants_are_remembered() -> None:
    quotas, _ = quotas_of(Limits(max_requests_per_minute=1))
    for number in range(MAX_TENANTS + 10):
        assert refusal(quotas, f"t{number}") is None
    assert len(quotas._uses) == MAX_TENANTS


def test_tokens_are_reserved_until_they_are_given_back_also_for_a_tenant_that_is_forgotten() -> None:
    quotas, _ = quotas_of(Limits(max_reserved_tokens=100))
    assert refusal(quotas) is None
    quotas.check_reserved("a", 100)
    quotas.reserve("a", 70)
    quotas.reserve("a", 50)  # a resumption, which is never refused
    for number in range(MAX_TENANTS + 1):
        assert refusal(quotas, f"t{number}") is None
    assert refusal(quotas) is None
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
