import pytest

from host.settings_loader import SettingsError, list_settings
from node.settings import SECTIONS, NodeSettings, choose_node_name, resolve_settings
from wire.identity import is_valid_name


def resolved(**flat: object) -> NodeSettings:
    return resolve_settings([("--set", {key.replace("__", "."): value for key, value in flat.items()})]).value


def test_every_setting_is_described_and_the_sections_are_known():
    settings = list_settings(NodeSettings)
    assert all(len(setting.description) > 20 for setting in settings)
    sections = {setting.key.split(".")[0] for setting in settings}
    assert sections == SECTIONS == {"memory", "engine", "models", "node", "sharing", "worker"}


def test_defaults_pass_their_own_checks():
    assert resolve_settings([]).value == NodeSettings()


def test_texts_become_numbers_and_switches():
    settings = resolved(engine__scripted__step_ms="5", memory__allow_above_metal_limit="true", memory__cap="1024")
    assert settings.engine.scripted.step_ms == 5.0
    assert settings.memory.allow_above_metal_limit is True
    assert settings.memory.cap in {"1024", 1024}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory.cap", "lots"),
        ("memory.cap", "0"),
        ("memory.cap", "120%"),
        ("memory.cap", "999999999999999TiB"),
        ("memory.cap", str(2**60 + 1)),
        ("memory.margin", "10%"),
        ("engine.mlx.prefix_cache_size", "10%"),
        ("engine.mlx.disk_cache_size", "half"),
        ("memory.guard", "maybe"),
        ("memory.tier", "reckless"),
        ("memory.allow_above_metal_limit", "perhaps"),
        ("engine.kind", "texd"),
        ("engine.scripted.text", "song"),
        ("engine.scripted.max_batch_size", "0"),
        ("engine.scripted.max_batch_size", "many"),
        ("engine.scripted.step_ms", "-1"),
        ("engine.scripted.memory", "50%"),
        ("engine.scripted.weights", "auto"),
        ("engine.scripted.model", ""),
        ("node.name", "bad\nname"),
        ("node.machine", "a/b"),
        ("node.report_busy_seconds", "0"),
        ("node.log_level", "loud"),
    ],
)
def test_an_impossible_value_is_refused_by_its_key(key: str, value: str):
    with pytest.raises(SettingsError, match=key.replace(".", r"\.")):
        resolve_settings([("--set", {key: value})])


def test_the_largest_size_is_allowed():
    assert resolved(memory__cap=str(2**60)).memory.cap == str(2**60)


def test_an_engine_computes_scores_or_vectors():
    both = r"engine\.scripted\.reranks and engine\.scripted\.dimensions: set one of them only"
    with pytest.raises(SettingsError, match=both):
        resolved(engine__scripted__reranks=True, engine__scripted__dimensions=8)
    assert resolved(engine__scripted__reranks=True).engine.scripted.dimensions == 0


def test_a_refused_choice_lists_what_there_is():
    with pytest.raises(SettingsError, match="scripted"):
        resolve_settings([("--set", {"engine.kind": "metal"})])
    with pytest.raises(SettingsError, match="safe, balanced, aggressive"):
        resolve_settings([("--set", {"memory.tier": "none"})])


def test_an_unknown_setting_is_refused_and_another_process_section_is_skipped():
    with pytest.raises(SettingsError, match=r"did you mean memory\.margin"):
        resolve_settings([("file", {"memory.margim": "1"})])
    assert resolve_settings([("file", {"router.policy": "x"})], frozenset({"router"})).value == NodeSettings()


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("studio.local", "studio"),
        ("Anna's Mac", "Anna-s Mac"),
        ("x" * 90, "x" * 63),
        ("--", "node"),
        ("", "node"),
        ("日本", "node"),
    ],
)
def test_a_node_is_named_after_its_host(host: str, name: str):
    assert choose_node_name(NodeSettings(), host) == name
    assert is_valid_name(name)


def test_a_name_that_was_set_counts():
    assert choose_node_name(resolved(node__name="Loft"), "studio") == "Loft"


def test_an_explicit_cap_is_of_the_tier_custom():
    assert resolve_settings([("--set", {"memory.cap": "12GiB"})]).value.memory.tier == "custom"
    assert resolve_settings([("--set", {"memory.cap": "12GiB", "memory.tier": "custom"})]).value.memory.tier == "custom"
    assert resolve_settings([("--set", {"memory.tier": "safe"})]).value.memory.tier == "safe"
    assert resolve_settings([]).value.memory.tier == "balanced"


@pytest.mark.parametrize("tier", ["safe", "balanced", "aggressive"])
def test_a_cap_that_contradicts_the_tier_is_refused_and_both_are_named_with_their_origins(tier: str):
    layers = [("config.toml", {"memory.tier": tier}), ("environment", {"memory.cap": "12GiB"})]
    with pytest.raises(
        SettingsError,
        match=rf"memory\.tier \(config\.toml\): {tier} contradicts memory\.cap = 12GiB "
        r"\(environment\).*remove memory\.tier.*or remove memory\.cap",
    ):
        resolve_settings(layers)


def test_a_cap_set_back_to_auto_contradicts_nothing():
    layers = [("config.toml", {"memory.cap": "12GiB"}), ("--set", {"memory.cap": "auto", "memory.tier": "safe"})]
    assert resolve_settings(layers).value.memory.tier == "safe"


def test_a_tier_that_there_is_not_is_refused_by_its_name_also_beside_a_cap():
    with pytest.raises(SettingsError, match=r"memory\.tier: 'reckless' is not one of"):
        resolve_settings([("--set", {"memory.tier": "reckless", "memory.cap": "12GiB"})])


def test_the_hugging_face_cache_is_an_absolute_path():
    with pytest.raises(SettingsError, match=r"models\.huggingface_cache: 'models/hub' is not an absolute path"):
        resolve_settings([("config.toml", {"models.huggingface_cache": "models/hub"})])
    for path in ("/Volumes/Models/hub", "~/hub"):
        assert resolve_settings([("config.toml", {"models.huggingface_cache": path})])


def test_the_tier_custom_needs_a_cap():
    with pytest.raises(SettingsError, match=r"memory\.tier \(environment\): custom needs memory\.cap"):
        resolve_settings([("environment", {"memory.tier": "custom"})])
