"""Every router ends each request while the only Mac is down, and uses the memory that a lease returns."""

from pathlib import Path

import pytest

from simulation.cluster import SimulatedPool
from simulation.peer_router import MAX_TRIES
from simulation.routers import CLAIRVOYANT
from simulation.run import run_scenario
from simulation.scenario import read_scenario
from wire.refusals import RefusalCode, Refused

ONE_MAC = """
about = "One Mac."
seconds = {seconds}
latency = 0.01
[[models]]
name = "chat"
weights = "4GiB"
kv_per_token = "1MiB"
active = 8.0
[[nodes]]
name = "mini"
chip = "M4"
memory = "24GiB"
loaded = ["chat"]
[[load]]
model = "chat"
rate = 1
prompt = {{ median = {prompt}, sigma = 0.0, least = 100, most = 4000 }}
output = {{ median = 20, sigma = 0.0, least = 10, most = 30 }}
[[events]]
node = "mini"
"""
CRASH = ONE_MAC.format(seconds=30, prompt=500) + 'at = 10.005\ndoes = "dies"\nseconds = 15\n'
LEASE = ONE_MAC.format(seconds=4, prompt=4000) + 'at = 0.5\ndoes = "lease"\nseconds = 20\nsize = "11GiB"\n'


def run(text: str, policy: str) -> SimulatedPool:
    """Run a scenario with a policy, and return its pool."""
    return run_scenario(read_scenario(text), policy, 1, Path("nowhere"))[1]


@pytest.mark.parametrize("policy", ["round-robin", "least-load", "power-of-two"])
def test_a_router_of_another_project_fails_requests_of_a_mac_that_is_down(policy: str):
    outcomes = run(CRASH, policy).outcomes.values()
    during = [outcome for outcome in outcomes if 10 < outcome.arrived < 25]
    assert len(during) > 5
    assert all(outcome.ended is not None for outcome in outcomes), "every request has ended"
    assert all(outcome.ended is not None and outcome.ended - outcome.arrived < 1 for outcome in during[1:-1])
    assert not any(outcome.served for outcome in during[1:-1])


def test_the_clairvoyant_serves_requests_that_arrive_while_the_only_mac_is_down():
    outcomes = run(CRASH, CLAIRVOYANT).outcomes.values()
    assert any(10.1 < outcome.arrived < 25 for outcome in outcomes)
    assert all(outcome.fits and outcome.served for outcome in outcomes)


def test_the_clairvoyant_places_what_waited_for_the_memory_of_a_lease_when_it_ends():
    pool = run(LEASE, CLAIRVOYANT)
    waited = [outcome.sent for outcome in pool.outcomes.values() if outcome.arrived > 1]
    assert waited
    assert all(outcome.served for outcome in pool.outcomes.values())
    assert 20.5 in [pytest.approx(sent, abs=0.001) for sent in waited]


def test_a_router_of_another_project_tries_a_refused_request_on_another_mac_and_gives_up_after_some_tries():
    two = LEASE.replace('loaded = ["chat"]', 'loaded = ["chat"]\ncount = 2').replace('node = "mini"', 'node = "mini-1"')
    full = two + two[two.index("[[events]]") :].replace('"mini-1"', '"mini-2"')
    outcomes = [one for one in run(full, "least-in-flight").outcomes.values() if one.first_refused]
    assert outcomes
    assert all(one.nodes[0] != one.nodes[1] for one in outcomes)
    assert max(one.tries for one in outcomes) == MAX_TRIES
    assert {one.tries for one in outcomes if not one.served} == {MAX_TRIES}


def test_the_clairvoyant_sends_a_request_to_the_mac_with_the_soonest_first_token():
    fast = ONE_MAC.format(seconds=5, prompt=500).replace(
        "[[load]]", '[[nodes]]\nname = "studio"\nchip = "M2 Ultra"\nmemory = "64GiB"\nloaded = ["chat"]\n[[load]]'
    )
    outcomes = run(fast + 'at = 4\ndoes = "lease"\nseconds = 1\nsize = "1MiB"\n', CLAIRVOYANT).outcomes
    assert outcomes["r0"].nodes == ["studio"]


def test_the_queue_of_the_production_router_has_the_limit_of_the_scenario():
    for limit, full in ((0, 0), (1, 1)):
        text = LEASE.replace("latency = 0.01", f"latency = 0.01\nqueue_limit = {limit}")
        outcomes = run(text.replace("rate = 1", "rate = 3"), "balanced").outcomes.values()
        codes = [one.outcome.code for one in outcomes if isinstance(one.outcome, Refused)]
        assert (codes.count(RefusalCode.QUEUE_FULL) > 0) == bool(full), limit
