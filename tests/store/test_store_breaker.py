from __future__ import annotations

from kvloom.store.breaker import Breaker


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make():
    clock, states = Clock(), []
    return (
        Breaker(failures=3, cool_down_s=1.0, longest_s=5.0, clock=clock, on_change=states.append),
        clock,
        states,
    )


def fail(breaker: Breaker) -> None:
    ticket = breaker.admit()
    assert ticket is not None
    breaker.failed(ticket)


def test_three_failures_in_a_row_open_it():
    breaker, _, states = make()
    for _ in range(2):
        fail(breaker)
    ticket = breaker.admit()
    breaker.succeeded(ticket)
    for _ in range(2):
        fail(breaker)
    assert (breaker.state, breaker.num_failures, states) == ("closed", 2, [])
    fail(breaker)
    assert (breaker.state, breaker.retry_in_s, states) == ("open", 1.0, ["open"])
    assert breaker.admit() is None


def test_the_cool_down_doubles_up_to_a_limit_and_starts_anew_after_a_success():
    breaker, clock, states = make()
    for _ in range(3):
        fail(breaker)
    for cool_down in (2.0, 4.0, 5.0, 5.0):
        clock.now += breaker.retry_in_s - 0.001
        assert breaker.admit() is None
        clock.now += 0.002
        assert breaker.state == "half-open"
        fail(breaker)
        assert breaker.state == "open"
        assert abs(breaker.retry_in_s - cool_down) < 1e-6
    clock.now += 5.1
    ticket = breaker.admit()
    breaker.succeeded(ticket)
    assert (breaker.state, breaker.num_failures) == ("closed", 0)
    for _ in range(3):
        fail(breaker)
    assert breaker.retry_in_s == 1.0
    assert states == ["open"] + ["half-open", "open"] * 4 + ["half-open", "closed", "open"]


def test_half_open_lets_one_call_through():
    breaker, clock, _ = make()
    for _ in range(3):
        fail(breaker)
    clock.now += 1.1
    ticket = breaker.admit()
    assert ticket is not None
    assert breaker.admit() is None
    breaker.succeeded(ticket)
    assert breaker.admit() is not None


def test_outcomes_from_before_it_opened_do_not_count():
    breaker, clock, _ = make()
    old = breaker.admit()
    for _ in range(3):
        fail(breaker)
    breaker.succeeded(old)
    assert breaker.state == "open"
    clock.now += 1.1
    probe = breaker.admit()
    breaker.succeeded(old)
    breaker.failed(old)
    assert breaker.state == "half-open"
    breaker.succeeded(probe)
    breaker.failed(old)
    assert (breaker.state, breaker.num_failures) == ("closed", 0)
