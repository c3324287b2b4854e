import pytest

from host.settings_loader import SettingsError, list_settings, resolve_layers
from router.placement.policies import POLICIES
from router.settings import RouterSettings


def test_settings_have_descriptions():
    for setting in list_settings(RouterSettings):
        assert setting.description.endswith("."), setting.key


def test_policy_setting_accepts_known_policies_only():
    for name in POLICIES:
        assert resolve_layers(RouterSettings, [("--set", {"policy": name})]).value.policy == name
    with pytest.raises(SettingsError, match="policy"):
        resolve_layers(RouterSettings, [("--set", {"policy": "luck"})])


@pytest.mark.parametrize("key", ["queue_timeout_seconds", "keepalive_seconds", "max_body_bytes", "slow_client_bytes"])
def test_nothing_can_be_set_to_zero_that_would_switch_a_guard_off(key: str):
    with pytest.raises(SettingsError):
        resolve_layers(RouterSettings, [("--set", {key: "0"})])
