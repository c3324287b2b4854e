from pathlib import Path

import click
import pytest

from coordinator.cli.commands.use import replay
from host.settings_loader import SettingsError, list_settings, resolve_layers
from router.placement.policies import POLICIES
from router.settings import RouterSettings

ROOT = Path(__file__).parents[3]


def test_settings_have_descriptions():
    for setting in list_settings(RouterSettings):
        assert setting.description.endswith("."), setting.key


def test_policy_setting_accepts_known_policies_only():
    for name in POLICIES:
        assert resolve_layers(RouterSettings, [("--set", {"policy": name})]).value.policy == name
    with pytest.raises(SettingsError, match="policy"):
        resolve_layers(RouterSettings, [("--set", {"policy": "luck"})])


def test_policies_are_named_in_the_setting_in_replay_and_in_the_manual():
    (setting,) = [one for one in list_settings(RouterSettings) if one.key == "policy"]
    (option,) = [option for option in replay.params if option.name == "policy"]
    assert isinstance(option.type, click.Choice)
    assert list(option.type.choices) == list(POLICIES)
    manual = (ROOT / "docs" / "placement.md").read_text()
    assert [name for name in POLICIES if name not in setting.description or f"`{name}`" not in manual] == []


@pytest.mark.parametrize("key", ["queue_timeout_seconds", "keepalive_seconds", "max_body_bytes", "slow_client_bytes"])
def test_nothing_can_be_set_to_zero_that_would_switch_a_guard_off(key: str):
    with pytest.raises(SettingsError):
        resolve_layers(RouterSettings, [("--set", {key: "0"})])
