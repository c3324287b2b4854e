"""Wrong calls of the command, as users type them: exit code 2 for usage, one clear sentence, the right next step.

CI runs the first two calls of each table, and a part of the rest that changes each day.
"""

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effort import thin_cases
from tests.support.processes import CLI, Pool, environment, pool, until

pytestmark = pytest.mark.slow

ALONE: tuple[tuple[str, int, str], ...] = (
    # these mistakes are found without a coordinator
    ("nods", 2, "did you mean `cluster nodes`?"),
    ("nodes --url http://127.0.0.1:1 --key-file /etc/hostname", 3, "cannot be reached"),
    ("keys", 2, "did you mean `cluster key`?"),
    ("video ls", 2, "did you mean `cluster video list`?"),
    ("node delete studio", 2, "did you mean `cluster node remove`?"),
    ("key delete laptop", 2, "did you mean `cluster key revoke`?"),
    ("token rm lab", 2, "did you mean `cluster token revoke`?"),
    ("model ps", 2, "there is no `cluster model ps`"),
    ("nodes inspect studio", 2, "cluster node show studio"),
    ("nodes cordon studio", 2, "cluster node cordon studio"),
    ("load qwen", 2, "cluster model load qwen"),
    ("unload qwen", 2, "cluster model unload qwen"),
    ("profile qwen", 2, "cluster model profile qwen"),
    ("videos", 2, "cluster video list"),
    ("videos create fox", 2, "cluster video create fox"),
    ("lease list", 2, "cluster video leases"),
    ("frobnicate", 2, "Help: cluster --help"),
    ("--verbose nodes", 2, "there is no option --verbose"),
    ("nodes --jason", 2, "there is no option --jason"),
    ("nodes -o yaml", 2, "'text', 'wide', 'json'"),
    ("nodes studio", 2, "unexpected extra argument"),
    ("node show", 2, "Missing argument 'NODE'"),
    ("node cordon", 2, "Missing argument 'NODE'"),
    ("node remove --yes", 2, "Missing argument 'NODE'"),
    ("node drain studio --wait soon", 2, "write 90s, 15m, 1h or 30d"),
    ("node drain studio --wait -5s", 2, "write 90s, 15m, 1h or 30d"),
    ("node logs studio --bytes many", 2, "is not a valid integer"),
    ("model load", 2, "Missing argument 'MODEL'"),
    ("model show", 2, "Missing argument 'MODEL'"),
    ("key create", 2, "Missing argument 'NAME'"),
    ("key create a --scope root", 2, "'infer', 'admin', 'metrics'"),
    ("key create a --expires tomorrow", 2, "write 90s, 15m, 1h or 30d"),
    ("key create a --concurrency 0", 2, "x>=1"),
    ("key create a --tokens-per-minute lots", 2, "is not a valid integer"),
    ("key create a --priority urgent", 2, "'low', 'normal', 'high'"),
    ("key limit", 2, "Missing argument 'KEY'"),
    ("key limit a --clear speed", 2, "'requests-per-minute'"),
    ("key rename a", 2, "Missing argument 'NAME'"),
    ("key expire a", 2, "either a time from now, such as 30d, or --never"),
    ("key expire a tomorrow", 2, "write 90s, 15m, 1h or 30d"),
    ("key rotate", 2, "Missing argument 'KEY'"),
    ("key revoke", 2, "Missing argument 'KEY'"),
    ("key usage --since yesterday", 2, "write 2026-01-31"),
    ("key usage --since 2026-13-01", 2, "write 2026-01-31"),
    ("token create --ttl soon", 2, "write 90s, 15m, 1h or 30d"),
    ("token create --uses 0", 2, "1<=x<=1000"),
    ("token create --uses 5000", 2, "1<=x<=1000"),
    ("pause 2x", 2, "write 90s, 15m, 1h or 30d"),
    ("pause studio 2x", 2, "write 90s, 15m, 1h or 30d"),
    ("pause studio soon", 2, "write 90s, 15m, 1h or 30d"),
    ("pause", 5, "there is no node"),
    ("resume", 5, "there is no node"),
    ("leave --yes", 5, "there is no node"),
    ("place", 2, "Missing argument 'MODEL'"),
    ("place m --prompt-tokens 0", 2, "x>=1"),
    ("chat --max-tokens none", 2, "is not a valid integer"),
    ("explain --last 0", 2, "1<=x<=1000"),
    ("replay /no/such/file --policy balanced", 2, "No such file"),
    ("replay", 2, "Missing"),
    ("simulate atlantis", 2, "atlantis"),
    ("events --last -1", 2, "0<=x<=500"),
    ("top --every 0", 2, "0.2<=x<=60"),
    ("audit --last none", 2, "is not a valid integer"),
    ("video create", 2, "Missing argument"),
    ("video create fox --seconds long", 2, "is not a valid integer"),
    ("video wait v --timeout later", 2, "write 90s, 15m, 1h or 30d"),
    ("video list --last 1000", 2, "1<=x<=100"),
    ("completion tcsh", 2, "'bash', 'zsh', 'fish'"),
    ("config check /no/such/file", 5, "there is no file"),
    ("config show no.such.setting", 5, "there is no setting"),
    ("up --listen nowhere", 2, "is not HOST:PORT"),
    ("up --listen 127.0.0.1:99999", 2, "is not HOST:PORT"),
    ("up --lan --listen 127.0.0.1:0", 2, "exclude each other"),
    ("up --no-local-node --models /tmp", 2, "--no-local-node"),
    ("up --set router.polcy=x", 2, "did you mean router.policy?"),
    ("up --set router", 2, "takes key=value"),
    ("up --set memory.cap=x --no-local-node", 2, "--no-local-node"),
    ("join https://127.0.0.1:1", 2, "macpool://127.0.0.1:8081"),
    ("join 127.0.0.1:1 --set memory.cpa=1", 2, "did you mean memory.cap?"),
    ("join 127.0.0.1:1 --models /no/such", 2, "/no/such is not a folder"),
    ("join 127.0.0.1:1 --models /tmp --set engine.kind=scripted", 2, "reads no model folders"),
    ("join 'not an address'", 1, "HOST:PORT"),
    ("join no-such-host.invalid", 3, "is `cluster up` running there"),
    ("join 127.0.0.1:1 --token mpj1.a", 2, "--token-file -"),
    ("join 127.0.0.1:1 --token-file /no/such", 2, "No such file"),
    ("nodes --url http://127.0.0.1:1", 4, "`cluster login URL` stores both"),
    ("nodes --url macpool://h:1 --key-file /etc/hostname", 2, "`endpoint` of `cluster up`"),
    ("nodes --url 127.0.0.1:x --key-file /etc/hostname", 2, "https://HOST:PORT"),
    ("nodes --url http://127.0.0.1:1 --key-file /no/such", 4, "/no/such cannot be read: No such file"),
    ("nodes", 3, "`cluster up`"),
    ("status", 3, "`cluster login URL`"),
    ("key create a", 5, "`cluster up`"),
    ("login macpool://h:8081 --key-file /etc/hostname", 2, "`endpoint` of `cluster up`"),
    ("login http://127.0.0.1:1 --key-file /no/such", 4, "cannot be read"),
    ("login http://127.0.0.1:1 --key-file /etc/hostname", 4, "`cluster key create NAME`"),
    ("trust-ca http://127.0.0.1:1", 2, "is not an HTTPS endpoint"),
    ("help nods", 2, "did you mean `cluster nodes`?"),
)
RUNNING: tuple[tuple[str, int, str], ...] = (
    # errors of the coordinator
    ("node show nope", 5, "nope"),
    ("key create twice", 6, "a key named twice exists already"),
    ("node cordon nope", 5, "nope"),
    ("node remove nope --yes", 5, "nope"),
    ("node remove one", 2, "add --yes"),
    ("node logs nope", 5, "nope"),
    ("node label one bad/label!", 2, "as in gpu=large"),
    ("pause nope 2h", 5, "nope"),
    ("model load nope", 5, "no node serves the model"),
    ("model show nope", 5, "models: scripted-1"),
    ("model load scripted-1 --node nope", 5, "no node 'nope'"),
    ("place nope", 6, "no node serves the model 'nope'"),
    ("chat hello --model nope --wait 0", 5, "nope"),
    ("explain nope", 5, "nope"),
    ("key revoke nope --yes", 5, "`cluster key list`"),
    ("key revoke twice", 2, "add --yes"),
    ("key create TWICE", 6, "a key named twice exists already"),
    ("key rename other twice", 6, "a key named twice exists already"),
    ("key rotate twice", 2, "add --yes"),
    ("key limit twice", 2, "name a limit to change"),
    ("key usage nope", 5, "`cluster key list`"),
    ("token revoke nope --yes", 5, "`cluster token list`"),
    ("approve 000000", 5, "code"),
    ("video show video_nope", 5, "video_nope"),
    ("video create a fox", 5, "`cluster video install`"),
    ("video get video_nope", 5, "video_nope"),
    ("login http://127.0.0.1:1 --key-file /etc/hostname", 6, "a coordinator runs in"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(tmp_path_factory.mktemp("pool")) as one:
        one.up()
        one.join("one")
        until(lambda: one.serves("one"), what="ready")
        for name in ("twice", "other"):
            one.create_key(name)
        yield one


def typed(line: str, state: Path) -> subprocess.CompletedProcess[str]:
    """Run a typed line, with a state folder of its own."""
    env = {**environment(), "MACPOOL_STATE": str(state)}
    command = [*CLI, *shlex.split(line)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=env,
        cwd=state.parent,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def check(done: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    """Check the form of an error: its code, one form, the next step, no traceback, short lines."""
    flat = " ".join(done.stderr.split())
    assert (done.returncode, words in flat) == (code, True), done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("Error: ") == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 900


def test_about_eighty_calls_are_tried():
    assert len(ALONE) + len(RUNNING) >= 80
    assert len({line for line, _, _ in (*ALONE, *RUNNING)}) >= 110


@pytest.mark.parametrize(
    ("line", "code", "words"), [pytest.param(*call, id=call[0]) for call in thin_cases(ALONE, 10, kept=2)]
)
def test_a_wrong_command_line_gets_an_error_with_the_next_step(tmp_path: Path, line: str, code: int, words: str):
    check(typed(line, tmp_path / "state"), code, words)


@pytest.mark.parametrize(
    ("line", "code", "words"), [pytest.param(*call, id=call[0]) for call in thin_cases(RUNNING, 6, kept=2)]
)
def test_a_wrong_command_to_a_pool_gets_an_error_with_the_next_step(made: Pool, line: str, code: int, words: str):
    check(typed(line, made.state), code, words)
