from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.settings_loader import SettingsError
from node.memory.cap import (
    CUSTOM,
    MAX_WIRED_SHARE,
    TIERS,
    Ceiling,
    MachineBounds,
    Margin,
    MemoryCap,
    MemoryTier,
    MetalDevice,
    build_limits,
    compute_ceiling,
    compute_reach,
    compute_reserve,
    compute_safe_wired_limit,
    estimate_metal_limit,
    resolve_cap,
    resolve_margin,
    with_device,
)
from wire.capacity.arithmetic import UNREADABLE, compute_default_margin
from wire.units import GIB, MIB

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
    cap = resolve_cap("auto", tier, MachineBounds(ram * GIB, metal and metal * GIB))
    assert cap.bytes == max(1, expected * GIB)
    assert cap.bound_by == bound_by
    assert cap.remedy
    assert not cap.warning


def test_the_metal_term_names_the_command_that_raises_it_and_never_more_than_95_percent_of_the_ram():
    remedy = resolve_cap("auto", "safe", MachineBounds(128 * GIB, 96 * GIB)).remedy
    assert remedy == "raise the Metal limit with sudo sysctl iogpu.wired_limit_mb=118784, then restart the node"
    with pytest.raises(SettingsError, match=r"\(sudo sysctl iogpu.wired_limit_mb=124518\)"):
        resolve_cap("128GiB", "safe", MachineBounds(128 * GIB, 96 * GIB))


def test_an_explicit_cap_above_metal_is_refused_unless_the_switch_is_on_and_then_warned_about():
    with pytest.raises(SettingsError, match=r"memory\.cap.*above the Metal limit.*memory\.allow_above_metal_limit"):
        resolve_cap("100GiB", "safe", MachineBounds(128 * GIB, 96 * GIB))
    cap = resolve_cap("100GiB", "safe", MachineBounds(128 * GIB, 96 * GIB), above_metal=True)
    assert cap.bytes == 100 * GIB
    assert "above the Metal limit" in cap.warning
    assert not resolve_cap("96GiB", "safe", MachineBounds(128 * GIB, 96 * GIB), above_metal=True).warning


def test_binary_and_decimal_units_are_two_things():
    bounds = MachineBounds(128 * GIB, 96 * GIB)
    assert resolve_cap("12GB", CUSTOM, bounds).bytes == 12 * 10**9
    assert resolve_cap("12GiB", CUSTOM, bounds).bytes == 12 * 2**30


def test_a_metal_limit_that_falls_under_the_cap_while_we_run_counts_and_is_warned_about():
    cap = resolve_cap("96GiB", CUSTOM, MachineBounds(128 * GIB, 64 * GIB), starting=False)
    assert (cap.bytes, cap.bound_by) == (64 * GIB, "metal")
    assert "iogpu.wired_limit_mb=98304" in cap.remedy
    assert "96.0 GiB" in cap.warning
    assert "64.0 GiB" in cap.warning


def test_a_container_below_the_cap_counts_and_is_warned_about():
    cap = resolve_cap("12GiB", CUSTOM, MachineBounds(64 * GIB, container=8 * GIB))
    assert (cap.bytes, cap.bound_by) == (8 * GIB, "container")
    assert "container" in cap.remedy
    assert "12.0 GiB" in cap.warning
    assert "8.0 GiB" in cap.warning
    assert not resolve_cap("8GiB", CUSTOM, MachineBounds(64 * GIB, container=8 * GIB)).warning


@pytest.mark.parametrize(
    ("metal", "container", "expected", "bound_by"),
    [
        (12 * GIB, 8 * GIB, 8 * GIB, "container"),
        (8 * GIB, 8 * GIB, 8 * GIB, "container"),
        (8 * GIB, 12 * GIB, 8 * GIB, "metal"),
        (None, 1, 1, "container"),
        (None, 0, 1, "container"),
        (0, 0, 1, "container"),
        (1, None, 1, "metal"),
        (0, None, 1, "metal"),
    ],
)
def test_of_two_limits_below_the_cap_the_lower_counts_and_neither_makes_it_zero(
    metal: int | None, container: int | None, expected: int, bound_by: str
):
    cap = resolve_cap("16GiB", CUSTOM, MachineBounds(64 * GIB, metal, container), starting=False)
    assert (cap.bytes, cap.bound_by) == (expected, bound_by)
    assert cap.warning


@pytest.mark.parametrize("metal", [0, 1])
def test_an_automatic_cap_is_never_zero(metal: int):
    assert resolve_cap("auto", "safe", MachineBounds(64 * GIB, metal)).bytes == 1
    assert resolve_cap("auto", "safe", MachineBounds(4 * GIB + metal)).bytes == 1


def test_a_cap_above_the_ram_is_an_error_at_the_start_and_the_ram_while_we_run():
    for ram in (1, GIB):
        with pytest.raises(SettingsError, match="more than the RAM"):
            resolve_cap(ram + 1, CUSTOM, MachineBounds(ram))
        assert resolve_cap(ram, CUSTOM, MachineBounds(ram)).bytes == ram
        assert resolve_cap(ram + 1, CUSTOM, MachineBounds(ram), starting=False).bytes == ram


def test_in_a_container_shares_and_reserves_are_of_its_limit():
    assert resolve_cap("50%", CUSTOM, MachineBounds(64 * GIB, container=32 * GIB)).bytes == 16 * GIB
    cap = resolve_cap("auto", "balanced", MachineBounds(64 * GIB, container=32 * GIB))
    assert (cap.bytes, cap.bound_by) == (24 * GIB, "container")


def test_without_readable_ram_only_a_size_is_a_valid_cap():
    for setting in ("auto", "80%"):
        with pytest.raises(SettingsError, match=r"memory\.cap.*cannot be read"):
            resolve_cap(setting, "balanced", MachineBounds(0))
    cap = resolve_cap("8GiB", CUSTOM, MachineBounds(0))
    assert cap.bytes == 8 * GIB
    assert "cannot be read" in cap.warning


@given(
    st.sampled_from(["12GiB", "80%", "1TiB"]),
    st.integers(1, 2**41),
    st.none() | st.integers(1, 2**41),
    st.none() | st.integers(0, 2**41),
    st.booleans(),
)
def test_whatever_the_machines_limits_become_a_set_cap_is_within_them_and_never_zero(
    setting: str, total: int, metal: int | None, container: int | None, above: bool
):
    try:
        cap = resolve_cap(setting, CUSTOM, MachineBounds(total, metal, container), above_metal=above, starting=False)
    except SettingsError:
        assert setting == "80%"
        assert min(total, container if container is not None else total) <= 1, "a share of nothing is nothing"
        return
    assert 1 <= cap.bytes <= total
    assert cap.bytes <= max(1, total if container is None else container)
    assert above or metal is None or cap.bytes <= metal


def test_the_switch_does_not_lift_an_automatic_cap():
    assert resolve_cap("auto", "safe", MachineBounds(128 * GIB, 96 * GIB), above_metal=True).bytes == 96 * GIB


@pytest.mark.parametrize(("setting", "size"), [("50%", 64 * GIB), ("12GiB", 12 * GIB), (5 * GIB, 5 * GIB), ("7", 7)])
def test_an_explicit_cap_is_taken_as_it_is(setting: str | int, size: int):
    assert resolve_cap(setting, "safe", MachineBounds(128 * GIB, 96 * GIB)) == MemoryCap(
        size, "setting", "raise memory.cap"
    )


@pytest.mark.parametrize("setting", ["0", "0%", 0, "129GiB", "many", "101%", "", -1])
def test_an_impossible_cap_is_refused_by_its_key(setting: str | int):
    with pytest.raises(SettingsError, match=r"memory\.cap"):
        resolve_cap(setting, "safe", MachineBounds(128 * GIB))


def test_margin_is_the_verdicts_default_or_as_it_is_and_zero_is_warned_about():
    assert resolve_margin("auto", 96 * GIB) == Margin(compute_default_margin(96 * GIB), automatic=True)
    assert resolve_margin("3GiB", 96 * GIB) == Margin(3 * GIB)
    assert resolve_margin("0", 96 * GIB).warning
    assert resolve_margin(0, 96 * GIB).bytes == 0
    assert resolve_margin("96GiB", 96 * GIB).warning
    with pytest.raises(SettingsError, match=r"memory\.margin"):
        resolve_margin("10%", 96 * GIB)


@pytest.mark.parametrize("setting", ["3GiB", "0", "96GiB"])
def test_the_engine_gets_whether_the_margin_is_automatic(setting: str):
    for margin, automatic in [(resolve_margin(setting, 96 * GIB), False), (resolve_margin("auto", 96 * GIB), True)]:
        assert margin.automatic is automatic
        assert build_limits(CAP, margin, compute_ceiling(CAP, 50 * GIB), guard=True).margin_auto is automatic


@pytest.mark.parametrize(("margin", "cap"), [(1, 2), (GIB - 1, GIB)])
def test_a_margin_that_leaves_a_byte_of_the_cap_is_not_warned_about(margin: int, cap: int):
    assert resolve_margin(margin, cap) == Margin(margin)
    assert resolve_margin(cap, cap).warning
    assert resolve_margin(2 * cap, cap).warning


CAP = MemoryCap(96 * GIB, "metal", "raise the limit")


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
        (200 * GIB, 1, 96 * GIB - 1, "leases"),
        (96 * GIB - 1, 1, 96 * GIB - 2, "leases"),
        (96 * GIB - 1, 0, 96 * GIB - 1, "dynamic"),
        (None, 0, 1, UNREADABLE),
    ],
)
def test_the_ceiling_and_its_binding_term(reach: int | None, leases: int, expected: int, bound_by: str):
    found = compute_ceiling(CAP, reach, leases)
    assert (found.bytes, found.bound_by) == (expected, bound_by)
    assert found.remedy


def test_without_a_lease_nothing_is_taken_off():
    assert compute_ceiling(CAP, 50 * GIB) == compute_ceiling(CAP, 50 * GIB, 0)
    assert build_limits(CAP, Margin(3), compute_ceiling(CAP, 50 * GIB), guard=True).leases == 0


@given(st.integers(1, 2**40), SIZES, SIZES)
def test_the_ceiling_is_never_zero_never_above_the_cap_and_falls_with_leases(cap: int, reach: int, leases: int):
    found = compute_ceiling(MemoryCap(cap, "static", "-"), reach, leases)
    assert 1 <= found.bytes <= max(1, min(cap, reach))
    assert compute_ceiling(MemoryCap(cap, "static", "-"), reach, leases + 1).bytes <= found.bytes
    assert (found.bound_by == "static") == (leases == 0 and reach >= cap)


@given(st.integers(1, 2**41), st.sampled_from(sorted(set(TIERS) - {CUSTOM})), st.none() | st.integers(1, 2**41))
def test_an_automatic_cap_is_within_ram_and_metal(ram: int, tier: str, metal: int | None):
    cap = resolve_cap("auto", tier, MachineBounds(ram, metal))
    assert 1 <= cap.bytes <= (ram if metal is None else min(ram, metal))


@given(st.none() | SIZES, st.none() | SIZES, SIZES, SIZES)
def test_dynamic_counts_each_byte_once_and_unknown_is_never_plenty(
    phys: int | None, free: int | None, worker: int, lease: int
):
    reach = compute_reach(phys, free, worker=worker, lease=lease)
    if phys is None or free is None:
        assert reach is None
    else:
        assert reach is not None
        assert phys + free <= reach <= phys + free + lease


def test_a_lease_or_worker_alone_adds_nothing_to_the_reach():
    assert compute_reach(5, 20) == 25
    assert compute_reach(5, 20, lease=7) == 25
    assert compute_reach(5, 20, worker=7) == 25


def test_a_workers_bytes_come_back_only_up_to_its_lease():
    """The bytes of a worker within its lease of 36 GiB are not free, and are already subtracted from the ceiling."""
    for held in (10, 36, 50):
        assert compute_reach(5 * GIB, 20 * GIB, worker=held * GIB, lease=36 * GIB) == (25 + min(held, 36)) * GIB


def test_limits_carry_what_is_in_force():
    frame = build_limits(CAP, Margin(3), compute_ceiling(CAP, 50 * GIB, 1), guard=False, leases=1)
    assert (frame.cap, frame.ceiling, frame.margin) == (96 * GIB, 50 * GIB - 1, 3)
    assert (frame.bound_by, frame.guard, frame.leases) == ("dynamic", False, 1)


@pytest.mark.parametrize(
    ("ram", "system", "limit"),
    [
        (16, "macOS 26.4", 11.84),
        (32, "macOS 26.4", 24.96),
        (36, "macOS 27.0", 28.08),
        (48, "macOS 26.4", 37.44),
        (64, "macOS 26.4", 51.84),
        (128, "macOS 26.4", 107.52),
        (128, "", 107.52),
        (24, "macOS 26.4", 24 * 0.76),
        (96, "macOS 26.4", 96 * 0.825),
        (512, "macOS 26.4", 384),
        (1024, "macOS 26.4", 768),
        (4, "macOS 26.4", 4 * 2 / 3),
        (16, "macOS 15.6", 16 * 2 / 3),
        (36, "macOS 14.1", 24),
        (37, "macOS 14.1", 27.75),
        (512, "macOS 15.5", 384),
    ],
)
def test_the_guess_of_metals_limit_is_what_macs_report_and_lies_between_them_elsewhere(
    ram: int, system: str, limit: float
):
    assert abs(estimate_metal_limit(ram * GIB, system) - limit * GIB) < MIB


@given(st.integers(1, 2**41), st.sampled_from(["", "macOS 15.5", "macOS 26.0", "macOS ", "Linux 6.8"]))
def test_the_guess_is_between_two_thirds_and_the_highest_share_that_was_seen(ram: int, system: str):
    assert int(ram * 2 / 3) <= estimate_metal_limit(ram, system) <= ram * 0.84


GUESSED = MachineBounds(128 * GIB, 100 * GIB)


@pytest.mark.parametrize(
    ("bounds", "device", "metal"),
    [
        (GUESSED, None, 100),
        (GUESSED, MetalDevice(107 * GIB), 107),
        (GUESSED, MetalDevice(90 * GIB), 90),
        # A user set a limit: the device's figure follows it, and neither is ever exceeded.
        (replace(GUESSED, metal=112 * GIB, wired=112 * GIB), MetalDevice(112 * GIB, 112 * GIB), 112),
        (replace(GUESSED, metal=112 * GIB, wired=112 * GIB), MetalDevice(110 * GIB, 112 * GIB), 110),
        (replace(GUESSED, metal=60 * GIB, wired=60 * GIB), MetalDevice(107 * GIB, 60 * GIB), 60),
        # The limit was set, changed or removed after the device was read: the lower figure counts.
        (replace(GUESSED, metal=112 * GIB, wired=112 * GIB), MetalDevice(107 * GIB), 107),
        (replace(GUESSED, metal=60 * GIB, wired=60 * GIB), MetalDevice(107 * GIB), 60),
        (GUESSED, MetalDevice(112 * GIB, 112 * GIB), 100),
        (GUESSED, MetalDevice(60 * GIB, 60 * GIB), 60),
    ],
)
def test_metals_limit_is_the_devices_figure_and_what_a_person_set_where_that_is_lower(
    bounds: MachineBounds, device: MetalDevice | None, metal: int
):
    assert with_device(bounds, device) == replace(bounds, metal=metal * GIB)


def test_a_machine_without_metal_gets_none_from_a_report():
    assert with_device(MachineBounds(64 * GIB), MetalDevice(48 * GIB)) == MachineBounds(64 * GIB)


def test_what_a_tier_leaves_to_the_system_and_counts_as_reclaimable():
    assert {name: (tier.reserve, tier.active_share) for name, tier in TIERS.items()} == {
        "safe": (12 * GIB, 0.2),
        "balanced": (8 * GIB, 0.5),
        "aggressive": (6 * GIB, 0.8),
        "custom": (0, 0.5),
    }


@pytest.mark.parametrize(
    "value",
    [MemoryTier(1, 0.5), MachineBounds(GIB), MetalDevice(GIB), CAP, Ceiling(1, "static", "-"), Margin(1)],
    ids=lambda value: type(value).__name__,
)
def test_a_settled_value_is_replaced_and_never_changed(
    value: MemoryTier | MachineBounds | MetalDevice | MemoryCap | Ceiling | Margin,
):
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, 0)


@pytest.mark.parametrize("tier", sorted(TIERS))
@pytest.mark.parametrize("total", [1, 8 * GIB, 16 * GIB, 64 * GIB, 512 * GIB])
def test_a_safe_wired_limit_leaves_the_system_its_reserve_and_a_share(tier: str, total: int):
    limit = compute_safe_wired_limit(tier, total)
    assert limit in (0, total - compute_reserve(tier, total), int(total * MAX_WIRED_SHARE))
    assert 0 <= limit <= total * MAX_WIRED_SHARE
    assert limit == 0 or total - limit >= compute_reserve(tier, total)


def test_a_safe_wired_limit_is_the_lower_of_reserve_and_share():
    assert compute_safe_wired_limit("balanced", 16 * GIB) == 16 * GIB - compute_reserve("balanced", 16 * GIB)
    assert compute_safe_wired_limit("aggressive", 2**50) == int(2**50 * MAX_WIRED_SHARE)
    assert compute_safe_wired_limit("safe", 1) == 0


def test_a_container_above_the_ram_adds_no_ram():
    assert MachineBounds(16 * GIB, container=64 * GIB).ram == 16 * GIB
    assert MachineBounds(64 * GIB, container=16 * GIB).ram == 16 * GIB
