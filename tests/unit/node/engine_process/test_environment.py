import sys
from pathlib import Path

import pytest

from node.engine_process import environment as tested
from node.engine_process.environment import DIGESTS, DISK_CACHE, MALLOC, PROFILES, build_engine_environment
from node.hub.digests import STORE_NAME


def test_temporary_files_are_private_and_the_hub_is_offline(tmp_path: Path):
    made = build_engine_environment({"A": "1"}, tmp_path / "deep" / "scratch", "bundled")
    assert made["A"] == "1"
    assert made["HF_HUB_OFFLINE"] == made["TRANSFORMERS_OFFLINE"] == "1"
    assert Path(made["TMPDIR"]).stat().st_mode & 0o777 == 0o700
    assert "LD_PRELOAD" not in made
    assert made["TOKENIZERS_PARALLELISM"] == "false"
    folder = tmp_path / "deep"
    assert [made[name] for name in (PROFILES, DISK_CACHE, DIGESTS)] == [
        str(folder / name) for name in ("profiles", "prefix-cache", STORE_NAME)
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc's thresholds are glibc's")
def test_on_linux_malloc_returns_memory_and_openblas_is_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library = tmp_path / "libopenblas.so.0"
    library.touch()
    monkeypatch.setattr(tested, "OPENBLAS", ("/nowhere", str(library)))
    made = build_engine_environment({"LD_PRELOAD": "/mine.so"}, tmp_path / "s", "auto")
    assert made.items() >= MALLOC.items()
    assert made["LD_PRELOAD"] == f"/mine.so {library}"
    assert "LD_PRELOAD" not in build_engine_environment({}, tmp_path / "s", "bundled")
    monkeypatch.setattr(tested, "OPENBLAS", ())
    assert "LD_PRELOAD" not in build_engine_environment({}, tmp_path / "s", "auto")
