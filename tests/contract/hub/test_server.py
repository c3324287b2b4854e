"""The server of repositories, with the unmodified library of the hub as client."""

import subprocess
import sys
from pathlib import Path

from tests.support.hub.hub import running_hub
from tests.support.processes import environment

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "1_Pooling/config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 4096,
}
DOWNLOAD = "import sys, huggingface_hub as h; print(h.snapshot_download(sys.argv[1], cache_dir=sys.argv[2]))"


def test_snapshot_download_works_against_the_server(tmp_path: Path):
    with running_hub() as hub:
        manifest = hub.add("tests/tiny", FILES)
        client = subprocess.run(
            [sys.executable, "-c", DOWNLOAD, "tests/tiny", str(tmp_path)],
            env=environment(HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert client.returncode == 0, client.stderr
    snapshot = Path(client.stdout.strip())
    assert snapshot.name == manifest.commit
    assert {name: (snapshot / name).read_bytes() for name in FILES} == FILES
    assert {path.name for path in (snapshot.parents[1] / "blobs").iterdir()} == {file.etag for file in manifest.files}
