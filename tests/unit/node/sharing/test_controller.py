"""The sharer with its file, its clock and its readings, and a node that records its calls."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from host.node_marks import PauseFile, PauseRecord
from host.power import PowerState
from host.settings_loader import SettingsError
from node.settings import SharingSettings, resolve_settings
from node.sharing.controller import SharingController
from node.sharing.policy import Occupancy, SharingAction, SharingState
from wire.frames import PauseNode as Order


@dataclass
class Mac:
    """The node that the sharer controls."""

    holding: Occupancy = field(default_factory=Occupancy)
    acts: list[SharingAction] = field(default_factory=list)
    told: int = 0

    def read_occupancy(self) -> Occupancy:
        return self.holding

    def apply_sharing_action(self, act: SharingAction, sharing: SharingState) -> None:
        self.acts.append(act)

    def on_sharing_change(self, sharing: SharingState) -> None:
        self.told += 1


@dataclass
class Scene:
    """A sharer with a settable clock and settable readings."""

    folder: Path
    settings: dict[str, object] = field(default_factory=dict)
    now: float = 1_000_000.0
    power: PowerState = field(default_factory=PowerState)

    def sharer(self) -> SharingController:
        self.mac = Mac()
        settings = msgspec.convert(self.settings, SharingSettings)
        return SharingController(settings, self.folder, self.mac, read=lambda: self.power, wall=lambda: self.now)


async def started(sharer: SharingController) -> SharingController:
    """Start the sharer without its loop, because the test calls it directly."""
    await sharer.start()
    await sharer.stop()
    return sharer


async def test_a_pause_outlives_the_node_and_ends_by_itself(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sharer = await started(scene.sharer())
    assert sharer.sharing_state.shared
    sharer.apply_order(Order(3600.0, "ann"))
    assert sharer.to_report().paused
    assert sharer.compute_retry_after() == 3600.0
    assert (tmp_path / "pause.json").stat().st_mode & 0o777 == 0o600
    assert (scene.mac.told, scene.mac.acts) == (1, [SharingAction.REST])
    again = await started(scene.sharer())
    assert again.to_report().why == "paused by ann"
    assert again.to_report().until == scene.now + 3600
    scene.now += 3600
    again.update()
    assert again.sharing_state.shared
    assert not (await started(scene.sharer())).to_report().paused


async def test_what_a_person_writes_or_removes_here_is_seen(tmp_path: Path) -> None:
    scene, file = Scene(tmp_path), PauseFile(tmp_path)
    sharer = await started(scene.sharer())
    file.write(PauseRecord(None))
    sharer.update()
    assert sharer.to_report().by_hand
    assert sharer.to_report().until is None
    assert sharer.compute_retry_after() is None
    file.write(PauseRecord(scene.now + 60))
    sharer.update()
    assert sharer.to_report().until == scene.now + 60
    assert file.remove()
    assert not file.remove()
    sharer.update()
    assert sharer.sharing_state.shared
    assert scene.mac.told == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"until": "soon"}', b'{"until": 1, "more": 2}', b"\xff\x00"])
async def test_a_damaged_pause_still_is_one(tmp_path: Path, content: bytes) -> None:
    scene, file = Scene(tmp_path), PauseFile(tmp_path)
    file.write(PauseRecord(None))
    file.path.write_bytes(content)
    sharer = await started(scene.sharer())
    assert sharer.to_report().paused
    assert "cluster resume" in sharer.to_report().why
    sharer.apply_order(Order(0.0))
    assert sharer.sharing_state.shared


async def test_the_loop_looks_by_itself(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sharer = scene.sharer()
    paused = asyncio.Event()
    scene.mac.on_sharing_change = lambda sharing: paused.set()
    await sharer.start()
    PauseFile(tmp_path).write(PauseRecord(None))
    await asyncio.wait_for(paused.wait(), 30)
    await sharer.stop()


async def test_work_that_ends_is_looked_at_at_once_and_stopping_ends_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.sharing.controller.POLL_INTERVAL_SECONDS", 3600.0)
    scene = Scene(tmp_path)
    sharer = scene.sharer()
    await sharer.stop()
    await sharer.start()
    await asyncio.sleep(0)
    for _ in range(2):
        changed = asyncio.Event()
        scene.mac.on_sharing_change = lambda sharing, changed=changed: changed.set()
        if not PauseFile(tmp_path).remove():
            PauseFile(tmp_path).write(PauseRecord(None))
        sharer.update_now()
        await asyncio.wait_for(changed.wait(), 30)
    await sharer.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_reading_that_fails_ends_no_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.sharing.controller.POLL_INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr("node.sharing.controller.SENSOR_INTERVAL_SECONDS", 0.0)
    readings = iter([PowerState(plugged=True), None, None, PowerState(plugged=False)])
    last = PowerState(plugged=False)

    def read() -> PowerState:
        reading = next(readings, last)
        if reading is None:
            raise RuntimeError("the tool of the system printed nonsense")
        return reading

    mac, paused = Mac(), asyncio.Event()
    mac.on_sharing_change = lambda sharing: paused.set()
    sharer = SharingController(msgspec.convert({"when": "plugged-in"}, SharingSettings), tmp_path, mac, read=read)
    await sharer.start()
    assert sharer.sharing_state.shared
    await asyncio.wait_for(paused.wait(), 30)
    assert sharer.sharing_state.why == "the Mac is on battery and shares only on mains power"
    await sharer.stop()


@pytest.mark.parametrize(("every", "reads"), [(100.0, False), (0.0, True)])
async def test_power_is_read_again_only_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: float, *, reads: bool
) -> None:
    monkeypatch.setattr("node.sharing.controller.POLL_INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr("node.sharing.controller.SENSOR_INTERVAL_SECONDS", every)
    scene = Scene(tmp_path, {"when": "plugged-in"}, power=PowerState(plugged=True))
    sharer, looks = scene.sharer(), asyncio.Semaphore(0)
    scene.mac.read_occupancy = lambda: looks.release() or Occupancy()
    await sharer.start()
    scene.power = PowerState(plugged=False)
    async with asyncio.timeout(30):
        for _ in range(5):
            await looks.acquire()
    await sharer.stop()
    assert sharer.sharing_state.shared is not reads


async def test_readings_decide_if_the_rule_depends_on_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"when": "plugged-in"}, power=PowerState(plugged=True))
    assert (await started(scene.sharer())).sharing_state.shared
    scene.power = PowerState(plugged=False)
    assert not (await started(scene.sharer())).sharing_state.shared
    scene.settings = {"when": "idle", "idle_seconds": 60.0}
    scene.power = PowerState(idle_s=59.0)
    assert not (await started(scene.sharer())).sharing_state.shared
    scene.power = PowerState(idle_s=61.0)
    assert (await started(scene.sharer())).sharing_state.shared


async def test_a_battery_that_varies_ends_no_work_twice(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"min_battery_percent": 50}, power=PowerState(plugged=False, battery=49.0))
    sharer = scene.sharer()
    await sharer.start()
    assert "the battery is at 49 %" in sharer.to_report().why
    for charge, shared in ((52.0, False), (55.0, True), (51.0, True), (49.0, False)):
        scene.power = PowerState(plugged=False, battery=charge)
        await sharer.read_power()
        sharer.update()
        assert sharer.sharing_state.shared is shared
    await sharer.stop()


async def test_a_battery_is_not_low_before_it_was_below_its_line(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"min_battery_percent": 50}, power=PowerState(plugged=False, battery=52.0))
    assert (await started(scene.sharer())).sharing_state.shared


async def test_requests_end_when_their_grace_is_over_and_not_before(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"grace_seconds": 0.05})
    sharer = await started(scene.sharer())
    scene.mac.holding = Occupancy(requests=1)
    await asyncio.sleep(0.1)
    sharer.apply_order(Order(None))
    assert scene.mac.acts == []
    await asyncio.sleep(0.1)
    sharer.update()
    assert scene.mac.acts == [SharingAction.END_REQUESTS]


async def test_a_longer_pause_begins_no_new_grace(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"grace_seconds": 0.05})
    sharer = await started(scene.sharer())
    scene.mac.holding = Occupancy(requests=1)
    sharer.apply_order(Order(100.0, "ann"))
    assert scene.mac.acts == []
    await asyncio.sleep(0.1)
    sharer.apply_order(Order(200.0, "ann"))
    assert scene.mac.acts == [SharingAction.END_REQUESTS]


async def test_grace_begins_when_the_answer_changes(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"grace_seconds": 0.0, "video_grace_seconds": 1e4})
    sharer = await started(scene.sharer())
    scene.mac.holding = Occupancy(requests=1, lending=True)
    sharer.update()
    assert scene.mac.acts == []
    sharer.apply_order(Order(None))
    assert scene.mac.acts == [SharingAction.END_REQUESTS]


@pytest.mark.parametrize(
    ("flat", "key"),
    [
        ({"sharing.when": "sometimes"}, "sharing.when"),
        ({"sharing.when": "hours"}, "sharing.hours"),
        ({"sharing.when": "hours", "sharing.hours": "22-7"}, "sharing.hours"),
        ({"sharing.idle_seconds": 0}, "sharing.idle_seconds"),
        ({"sharing.min_battery_percent": 101}, "sharing.min_battery_percent.*100"),
        ({"sharing.min_battery_percent": -1}, "sharing.min_battery_percent.*0"),
        ({"sharing.min_battery_percent": "half"}, "sharing.min_battery_percent"),
        (
            {"sharing.when": "plugged-in", "sharing.min_battery_percent": 40},
            "sharing.min_battery_percent: 40 % contradicts",
        ),
    ],
)
def test_an_impossible_rule_is_refused_by_its_key(flat: dict[str, object], key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        resolve_settings([("test", flat)])


def local(hour: int, minute: int = 0) -> float:
    """Return a moment of this machine's own day in Unix seconds."""
    return time.mktime((2026, 6, 15, hour, minute, 0, 0, 0, -1))


@pytest.fixture(params=["UTC", "JST-9"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the time zone of this process."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("zone")
async def test_hours_are_of_this_machines_own_clock_and_the_answer_names_the_next_begin(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"when": "hours", "hours": "22:00-07:00"}, now=local(21, 59))
    sharer = await started(scene.sharer())
    told = sharer.to_report()
    assert (told.when, told.paused, told.by_hand, told.until) == ("hours", True, False, local(22))
    assert told.why == "the Mac shares only within 22:00-07:00"
    assert sharer.compute_retry_after() == 60.0
    scene.now += 30.0
    sharer.update()
    assert sharer.compute_retry_after() == 30.0
    for fraction in (0.1, 0.4, 0.6, 0.9):
        scene.now = local(21, 59) + 30.0 + fraction
        sharer.update()
        assert sharer.to_report().until == local(22), fraction
    for hour, minute, shared in ((22, 0, True), (23, 59, True), (6, 59, True), (7, 0, False), (12, 0, False)):
        scene.now = local(hour, minute)
        sharer.update()
        assert sharer.sharing_state.shared is shared, (hour, minute)
    assert scene.mac.told == 3, "at the start, and at each change"


async def test_the_settings_are_those_of_the_rule_in_force(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"when": "idle", "idle_seconds": 120.0}, power=PowerState(idle_s=119.0))
    assert (await started(scene.sharer())).to_report().why == "the Mac is in use and shares after 2 min without input"
    scene.settings = {"when": "plugged-in"}
    scene.power = PowerState(plugged=False)
    why = "the Mac is on battery and shares only on mains power"
    assert (await started(scene.sharer())).to_report().why == why
    assert (await started(Scene(tmp_path).sharer())).to_report().when == "always"


async def test_requests_and_videos_have_each_their_own_grace(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"grace_seconds": 1e4, "video_grace_seconds": 0.0})
    sharer = await started(scene.sharer())
    scene.mac.holding = Occupancy(requests=1, lending=True)
    sharer.apply_order(Order(None))
    assert scene.mac.acts == [SharingAction.END_LEASE]


async def test_power_is_read_only_where_the_rule_needs_it(tmp_path: Path) -> None:
    read = list[int]()
    rules: tuple[tuple[dict[str, object], int], ...] = (
        ({}, 0),
        ({"when": "idle"}, 1),
        ({"when": "plugged-in"}, 1),
        ({"min_battery_percent": 40}, 1),
    )
    for settings, times in rules:
        scene = Scene(tmp_path, settings)
        sharer = SharingController(
            msgspec.convert(settings, SharingSettings),
            scene.folder,
            Mac(),
            wall=lambda: 1.0,
            read=lambda: read.append(1) or PowerState(plugged=True, idle_s=1e6),
        )
        await started(sharer)
        assert (len(read), sharer.sharing_state.shared) == (times, True)
        read.clear()


async def test_a_pause_that_ends_in_a_moment_is_retried_after_a_second_at_least(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sharer = await started(scene.sharer())
    sharer.apply_order(Order(0.2, "ann"))
    assert sharer.compute_retry_after() == 1.0
    assert sharer.to_report().by_hand


async def test_resuming_wakes_what_rests_and_a_long_name_is_cut(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sharer = await started(scene.sharer())
    sharer.apply_order(Order(None, "x" * 500))
    assert sharer.to_report().why == f"paused by {'x' * 100}"
    scene.mac.holding = Occupancy(resting=True)
    scene.mac.acts.clear()
    sharer.apply_order(Order(0.0))
    assert scene.mac.acts == [SharingAction.WAKE]
    assert sharer.to_report().why == ""
    assert PauseFile(tmp_path).read_stamp() is None
