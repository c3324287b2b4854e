"""A stand-in for the video engine, for tests of processes and leases.

It is an environment whose interpreter is a script. The script sends the events of a worker, uses as much memory and
stays in a phase as long as a test wants. It makes no real clips.

The prompt of the job controls the script. `hold=PHASE`: stay in this phase until `Gate.open` for the job's seed.
`pace=SECONDS`: duration of each phase. `take=BYTES`: memory used while loading. `clip=BYTES`: size of the clip;
`clip=none`: no clip. Other words are ignored.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from node.video import environment

CLIP = b"\0\0\0\x18ftypmp42" + bytes(range(256)) * 32
"""The first bytes of each clip."""
SCRIPT = """#!{python} -I
import json, os, pathlib, sys, threading, time

def hold_on():
    while os.read(0, 4096):
        pass
    os._exit(4)

def say(event, **facts):
    print(json.dumps(dict(facts, event=event)), flush=True)

data = b""
while not data.endswith(b"\\n"):
    piece = os.read(0, 65536)
    if not piece:
        sys.exit(2)
    data += piece
job = json.loads(data)
threading.Thread(target=hold_on, daemon=True).start()
how = dict(word.split("=", 1) for word in job["prompt"].split() if "=" in word)
taken = b""
gate = pathlib.Path({gates!r}, str(job["seed"]))
steps = job["steps"]
for phase, event in (
    ("starting", dict(event="start")), ("loading", dict(event="loading")),
    ("denoising", dict(event="progress", phase="denoise", step=1, steps=steps)),
    ("decoding", dict(event="progress", phase="decode", step=steps, steps=steps)),
    ("saving", dict(event="progress", phase="save", step=steps, steps=steps)),
):
    say(**event)
    if phase == "loading":
        taken = b"x" * int(how.get("take", 0))
    time.sleep(float(how.get("pace", {pace})))
    while phase == how.get("hold") and not gate.exists():
        time.sleep(0.01)
out = pathlib.Path(job["out"])
clip = {clip!r}
if how.get("clip") != "none":
    (out / "video.mp4").write_bytes(clip + bytes(max(0, int(how.get("clip", 0)) - len(clip))))
names = ("width", "height", "frames", "fps", "seed", "steps")
say("done", made=dict({{name: job[name] for name in names}}, files=["video.mp4"]))
os._exit(0)
"""


@dataclass(frozen=True)
class Gate:
    """The files for which stand-ins wait."""

    environments: Path
    folder: Path

    def open(self, seed: int) -> None:
        """Release the job with this seed."""
        (self.folder / str(seed)).touch()


def standin(folder: Path, pace: float = 0.0) -> Gate:
    """Write the environment into a folder. `pace` is the duration, in seconds, of each phase of a job without one."""
    gates, made = (
        folder / "gates",
        environment.get_environment_path(folder / "environments", environment.find_requirement_files()),
    )
    (made / "bin").mkdir(parents=True)
    gates.mkdir()
    script = environment.get_interpreter(made)
    script.write_text(SCRIPT.format(python=sys.executable, gates=str(gates), clip=CLIP, pace=pace))
    script.chmod(0o755)
    (made / environment.READY).write_text(json.dumps({"engine": "stand-in"}))
    return Gate(folder / "environments", gates)
