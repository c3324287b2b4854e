"""Parts of the worker that need no engine. The rest runs with the real engine in tests/e2e/video/test_node.py."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from node.video.worker import worker


class Config:
    """An engine's config class in an old version: it has fewer arguments than later ones."""

    def __init__(
        self,
        model_name: str,
        transformer_overrides: dict[str, object],
        text_encoder_overrides: dict[str, object],
        base_model: str,
    ) -> None:
        self.model_name = model_name
        self.known, self.text, self.base_model = transformer_overrides, text_encoder_overrides, base_model
        self.priority, self.num_train_steps, self.max_sequence_length = 1, 1000, 512
        self.transformer_overrides, self.text_encoder_overrides = transformer_overrides, text_encoder_overrides

    @classmethod
    def wan2_2_t2v_a14b(cls) -> "Config":
        return cls(
            "catalogue",
            {"num_layers": 40, "ffn_dim": 13824, "vae_config": {"base_dim": 96, "z_dim": 16}},
            {"d_model": 4096},
            "a14b",
        )

    @classmethod
    def wan2_2_ti2v_5b(cls) -> "Config":
        return cls(
            "catalogue",
            {"num_layers": 30, "ffn_dim": 14336, "vae_config": {"base_dim": 160, "z_dim": 48}},
            {"d_model": 4096},
            "5b",
        )


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_a_package_without_configs_has_the_values_of_the_catalogue(tmp_path: Path):
    write(tmp_path / "model_index.json", {"transformer_2": ["diffusers", "X"], "boundary_ratio": 0.875})
    found = worker.build_package_config(tmp_path, Config)
    assert (found.base_model, found.known["num_layers"], found.known["boundary_ratio"]) == ("catalogue", 40, 0.875)
    assert found.known["has_transformer_2"] is True
    assert found.known["vae_config"] == {"base_dim": 96, "z_dim": 16}


def test_configs_of_a_package_override_the_catalogue(tmp_path: Path):
    write(tmp_path / "model_index.json", {"transformer_2": [None, None], "expand_timesteps": True})
    write(tmp_path / "transformer" / "config.json", {"num_layers": 2, "_class_name": "X", "ffn_dim": 128})
    write(tmp_path / "vae" / "config.json", {"base_dim": 8, "other": 1})
    write(tmp_path / "text_encoder" / "config.json", {"d_model": 64, "vocab": 5})
    found = worker.build_package_config(tmp_path, Config)
    assert (found.known["num_layers"], found.known["ffn_dim"], found.known["has_transformer_2"]) == (2, 128, False)
    assert found.known["expand_timesteps"] is True
    assert found.known["vae_config"] == {"base_dim": 8, "z_dim": 48}
    assert found.text == {"d_model": 64}


def test_a_call_gets_what_it_takes():
    def old(a: int, b: int = 2) -> tuple[int, int]:
        return a, b

    assert worker.call_supported(old, a=1, c=3) == (1, 2)


def test_failures_have_names():
    class TensorHealthError(Exception):
        pass

    assert worker.classify_error(TensorHealthError(), began=True) == "output_invalid"
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert worker.classify_error(OSError(number, "full"), began=True) == "disk_full"
    assert worker.classify_error(FileNotFoundError(), began=False) == "model_invalid"
    assert worker.classify_error(ValueError(), began=False) == "generation_failed"
    assert worker.classify_error(RuntimeError(), began=True) == "generation_failed"
    for error in ("[METAL] Command buffer execution failed: Insufficient Memory.", "[metal::malloc] Attempting to ..."):
        assert worker.classify_error(RuntimeError(error), began=False) == "generation_failed"
    assert worker.classify_error(RuntimeError("no layer of this name"), began=False) == "model_invalid"


class Metal:
    """MLX on a Mac: it refuses a wired limit above its own."""

    def __init__(self, info: dict[str, int] | None = None) -> None:
        self.set: dict[str, int] = {}
        self._info = {"max_recommended_working_set_size": 20 * 2**30} if info is None else info

    def device_info(self) -> dict[str, int]:
        return self._info

    def set_wired_limit(self, size: int) -> None:
        assert size <= 20 * 2**30
        self.set["wired"] = size

    def set_memory_limit(self, size: int) -> None:
        self.set["memory"] = size

    def set_cache_limit(self, size: int) -> None:
        self.set["cache"] = size


def test_the_wired_limit_is_below_the_lease_and_below_metals():
    metal = Metal()
    assert worker.set_memory_limits(metal, 16 * 2**30) == 14 * 2**30
    assert metal.set == {"wired": 14 * 2**30, "memory": 16 * 2**30, "cache": 10**9}
    assert worker.set_memory_limits(metal, 36 * 2**30) == 20 * 2**30
    unwired = Metal()
    assert worker.set_memory_limits(unwired, 16 * 2**30, wire=False) == 0
    assert unwired.set == {"memory": 16 * 2**30, "cache": 10**9}, "memory.wire = off holds for the worker, too"


class OlderMetal(Metal):
    """MLX that cannot name its device."""

    def device_info(self) -> dict[str, int]:
        raise RuntimeError


def test_a_small_lease_keeps_half_wired_and_an_eighth_cached():
    metal = Metal()
    assert worker.set_memory_limits(metal, 2**30) == 2**29
    assert metal.set == {"wired": 2**29, "memory": 2**30, "cache": 2**27}


@pytest.mark.parametrize("metal", [Metal({}), OlderMetal()])
def test_where_metal_names_no_limit_the_lease_alone_bounds(metal: Metal):
    assert worker.set_memory_limits(metal, 16 * 2**30) == metal.set["wired"] == 14 * 2**30


def test_it_ends_without_a_user_and_runs_without_macpool_installed():
    command = [sys.executable, "-I", worker.__file__]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (worker.EXIT_NO_JOB, b"")
    done = subprocess.run(command, input=b"no json\n", capture_output=True, check=False)
    assert done.returncode == worker.EXIT_NO_JOB
