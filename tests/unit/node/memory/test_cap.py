import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.memory.cap import (
    TIERS,
    Cap,
    Margin,
    ceiling,
    default_metal,
    dynamic,
    limits,
    resolve_cap,
    resolve_margin,
)
from wire.settings import SettingsError
from wire.units import GIB, MIB
from wire.verdict import default_margin

SIZES = st.integers(0, 2**40)


@pytest.mark.parametrize(
    ("ram", "tier", "metal", "expected", "bound_by"),
    [
        (16, "safe", None, 12, "static"),
        (16, "aggressive", 12, 12, "static"),
        (23, "balanced", None, 19, "static"),
        (24, "safe", None, 12, "static"),
        (48, "safe", 36, 36, "static"),
        (48, "balanced", 36, 36, "metal"),
        (48, "balanced", 44, 40, "static"),
        (128, "safe", 96, 96, "metal"),
        (128, "safe", 120, 116, "static"),
        (128, "balanced", 124, 120, "static"),
        (128, "aggressive", 124, 122, "static"),
        (2, "safe", None, 0, "static"),
    ],
)
def test_an_automatic_cap(ram: int, tier: str, metal: int | None, expected: int, bound_by: str):
    cap = resolve_cap("auto", tier, ram * GIB, metal and metal * GIB)
    assert cap.bytes == max(1, expected * GIB)
    assert cap.bound_by == bound_by
    assert cap.remedy
    assert not cap.warning


def test_the_metal_term_names_the_command_that_raises_it_and_never_more_than_95_percent_of_the_ram():
    assert "iogpu.wired_limit_mb=118784" in resolve_cap("auto", "safe", 128 * GIB, 96 * GIB).remedy
    with pytest.raises(SettingsError, match=f"iogpu.wired_limit_mb={int(128 * GIB * 0.95) // MIB}"):
        resolve_cap("128GiB", "safe", 128 * GIB, 96 * GIB)


def test_an_explicit_cap_above_metal_is_refused_unless_the_switch_is_on_and_then_warned_about():
    with pytest.raises(SettingsError, match=r"memory\.cap.*above the Metal limit.*memory\.above_metal"):
        resolve_cap("100GiB", "safe", 128 * GIB, 96 * GIB)
    cap = resolve_cap("100GiB", "safe", 128 * GIB, 96 * GIB, above_metal=True)
    assert cap.bytes == 100 * GIB
    assert "above the Metal limit" in cap.warning
    assert not resolve_cap("96GiB", "safe", 128 * GIB, 96 * GIB, above_metal=True).warning


def test_the_switch_does_not_lift_an_automatic_cap():
    assert resolve_cap("auto", "safe", 128 * GIB, 96 * GIB, above_metal=True).bytes == 96 * GIB


@pytest.mark.parametrize(("setting", "size"), [("50%", 64 * GIB), ("12GiB", 12 * GIB), (5 * GIB, 5 * GIB), ("7", 7)])
def test_an_explicit_cap_is_taken_as_it_is(setting: str | int, size: int):
    assert resolve_cap(setting, "safe", 128 * GIB, 96 * GIB) == Cap(size, "setting", "raise memory.cap")


@pytest.mark.parametrize("setting", ["0", "0%", 0, "129GiB", "many", "101%", "", -1])
def test_an_impossible_cap_is_refused_by_its_key(setting: str | int):
    with pytest.raises(SettingsError, match=r"memory\.cap"):
        resolve_cap(setting, "safe", 128 * GIB, None)


def test_margin_is_the_verdicts_default_or_as_it_is_and_zero_is_warned_about():
    assert resolve_margin("auto", 96 * GIB) == Margin(default_margin(96 * GIB))
    assert resolve_margin("3GiB", 96 * GIB) == Margin(3 * GIB)
    assert resolve_margin("0", 96 * GIB).warning
    assert resolve_margin(0, 96 * GIB).bytes == 0
    assert resolve_margin("96GiB", 96 * GIB).warning
    with pytest.raises(SettingsError, match=r"memory\.margin"):
        resolve_margin("10%", 96 * GIB)


CAP = Cap(96 * GIB, "metal", "raise the limit")


@pytest.mark.parametrize(
    ("reach", "leases", "expected", "bound_by"),
    [
        (200 * GIB, 0, 96 * GIB, "metal"),
        (96 * GIB, 0, 96 * GIB, "metal"),
        (50 * GIB, 0, 50 * GIB, "dynamic"),
        (200 * GIB, 36 * GIB, 60 * GIB, "leases"),
        (50 * GIB, 36 * GIB, 14 * GIB, "dynamic"),
        (90 * GIB, 36 * GIB, 54 * GIB, "leases"),
        (10 * GIB, 36 * GIB, 1, "dynamic"),
        (200 * GIB, 200 * GIB, 1, "leases"),
        (None, 0, 1, "dynamic"),
    ],
)
def test_the_ceiling_and_its_binding_term(reach: int | None, leases: int, expected: int, bound_by: str):
    found = ceiling(CAP, reach, leases)
    assert (found.bytes, found.bound_by) == (expected, bound_by)
    assert found.remedy


@given(st.integers(1, 2**40), SIZES, SIZES)
def test_the_ceiling_is_never_zero_never_above_the_cap_and_falls_with_leases(cap: int, reach: int, leases: int):
    found = ceiling(Cap(cap, "static", "-"), reach, leases)
    assert 1 <= found.bytes <= max(1, min(cap, reach))
    assert ceiling(Cap(cap, "static", "-"), reach, leases + 1).bytes <= found.bytes
    assert (found.bound_by == "static") == (leases == 0 and reach >= cap)


@given(st.integers(1, 2**41), st.sampled_from(sorted(TIERS)), st.none() | st.integers(1, 2**41))
def test_an_automatic_cap_is_within_ram_and_metal(ram: int, tier: str, metal: int | None):
    cap = resolve_cap("auto", tier, ram, metal)
    assert 1 <= cap.bytes <= (ram if metal is None else min(ram, metal))


@given(st.none() | SIZES, st.none() | SIZES, SIZES, SIZES)
def test_dynamic_counts_each_byte_once_and_unknown_is_never_plenty(
    phys: int | None, free: int | None, worker: int, lease: int
):
    reach = dynamic(phys, free, worker=worker, lease=lease)
    if phys is None or free is None:
        assert reach is None
    else:
        assert reach is not None
        assert phys + free <= reach <= phys + free + lease


def test_a_workers_bytes_come_back_only_up_to_its_lease():
    """A worker within its lease of 36 GiB: what it holds is not free, and is off the ceiling already."""
    for held in (10, 36, 50):
        assert dynamic(5 * GIB, 20 * GIB, worker=held * GIB, lease=36 * GIB) == (25 + min(held, 36)) * GIB


def test_limits_carry_what_is_in_force():
    frame = limits(CAP, Margin(3), ceiling(CAP, 50 * GIB, 1), guard=False, leases=1)
    assert (frame.cap, frame.ceiling, frame.margin) == (96 * GIB, 50 * GIB - 1, 3)
    assert (frame.bound_by, frame.guard, frame.leases) == ("dynamic", False, 1)


def test_metals_default_is_three_quarters():
    assert default_metal(128 * GIB) == 96 * GIB
