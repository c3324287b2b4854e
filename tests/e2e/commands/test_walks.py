"""Three users follow the README and the manual, on isolated machines with default ports.

They are a hobbyist with three Macs, an administrator of a lab, and a developer. Each line is typed into a terminal as
it is in the manual; values that a command printed are pasted from its output. `make walks` prints the sessions.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.effort import IS_NIGHTLY
from tests.support.cluster.hosts import Hosts, unsupported
from tests.support.person import QUICK, Person, Started
from tests.support.processes import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(400)]
ASK = textwrap.dedent(
    """
    from openai import OpenAI
    client = OpenAI()
    answer = client.chat.completions.create(
        model="macpool-tiny", messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
    )
    print(answer.choices[0].message.content)
    """
)


@pytest.fixture
def people(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Person]]:
    """Make four machines: the first is the coordinator, the last is no Mac of the pool.

    The hobbyist's first Mac has the defaults; in the nightly run all have them.
    """
    why = unsupported()
    if why:
        pytest.skip(why)
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(tmp_path, 4))
        made = [Person(host, stack) for host in hosts.hosts]
        with_defaults = 0 if request.function is not test_a_hobbyist_with_three_macs else 4 if IS_NIGHTLY else 1
        for person in made[with_defaults:]:
            person.variables.update(QUICK)
        yield made
        if request.config.get_verbosity() > 0:
            print("\n".join(said for person in made for said in person.seen))


def begin(person: Person) -> tuple[Started, dict[str, str]]:
    """Type `cluster up --lan`; return the printed facts by label."""
    up = person.start("cluster up --lan")
    up.until(r"^Ctrl-C stops it")
    facts = {
        "endpoint": up.until(r"^endpoint\s+(\S+)")[1],
        "trust": up.until(r"^trust it\s+(cluster trust-ca .*?)\s+\(")[1],
        "key": up.until(r"^API key\s+(mp_\S+)")[1],
        "join": up.until(r"^add a Mac\s+(.*)$")[1],
    }
    assert up.said().count("\n") < 30, up.said()
    return up, facts


def python(program: str) -> str:
    """Return the line that runs a Python program."""
    return f"{sys.executable} -c '{program}'"


def states(person: Person) -> dict[str, str]:
    """Return the states of the nodes, from the coordinator of this person's machine."""
    return {one["name"]: one["state"] for one in person.get("/api/v1/nodes")["nodes"]}


def test_a_hobbyist_with_three_macs(people: list[Person]):
    studio, mini, laptop, phone = people
    up, facts = begin(studio)
    assert studio.type('cluster chat "Who are you?"').startswith("I am macpool-tiny")
    # the second Mac by the printed line, the third by a code
    mini.start(facts["join"]).until(r"is in the pool of")
    joining = laptop.start("cluster join")
    code = joining.until(r"\b(\d{3} ?\d{3})\b")[1].replace(" ", "")
    assert "h3" in "\n".join(studio.look("cluster approve"))
    studio.type(f"cluster approve {code}")
    joining.until(r"is in the pool of")
    until(lambda: states(studio) == dict.fromkeys(("h1", "h2", "h3"), "ready"), 30, "three Macs are ready")
    for person in (studio, mini):
        table = person.look("cluster nodes")
        assert sum("ready" in line for line in table) == 3, table
        person.look("cluster models")
        person.look("cluster status")
    # a program on another machine
    phone.type(facts["trust"])
    phone.variables = {"OPENAI_BASE_URL": facts["endpoint"], "OPENAI_API_KEY": facts["key"]}
    bundle = re.search(r"SSL_CERT_FILE=(\S+)", phone.type("cluster env --key-file /dev/null || true") + facts["trust"])
    if bundle:
        phone.variables["SSL_CERT_FILE"] = bundle[1]
    assert "The capital of France is Paris." in phone.type(python(ASK))
    assert phone.type('curl -sS $OPENAI_BASE_URL/models -H "Authorization: Bearer $OPENAI_API_KEY"').startswith("{")
    # the owner of the second Mac takes it back
    mini.type("cluster pause 2h")
    until(lambda: states(studio)["h2"] == "paused", 20, "paused")
    assert "paused" in "\n".join(studio.look("cluster nodes"))
    mini.type("cluster resume")
    until(lambda: states(studio)["h2"] == "ready", 20, "ready again")
    # and the third leaves
    laptop.type("cluster leave --yes")
    until(lambda: states(studio)["h3"] == "left", 20, "left")
    studio.type("cluster node cordon h2")
    studio.type("cluster node uncordon h2")
    studio.type("cluster doctor || true")
    said = up.interrupt()
    assert said.rstrip().endswith("stopped"), said[-500:]
    again, kept = begin_again(studio)
    assert kept == facts["endpoint"]
    until(lambda: states(studio)["h2"] == "ready", 40, "the second Mac is back without a word")
    again.interrupt()


def begin_again(person: Person) -> tuple[Started, str]:
    up = person.start("cluster up --lan")
    up.until(r"^Ctrl-C stops it")
    return up, up.until(r"^endpoint\s+(\S+)")[1]


@pytest.mark.nightly
def test_an_administrator_of_a_lab(people: list[Person]):
    """CI has the walk of the hobbyist, and these tests:

    - `tests/e2e/test_hosts.py::test_the_coordinator_moves_to_another_host_and_the_old_one_is_left_behind`
    - `tests/unit/coordinator/cli/test_command_line.py`
    """
    studio, mini, spare, desk = people
    up, facts = begin(studio)
    token = re.search(r"mpj1\.\S+", studio.type("cluster token create --uses 5 --expires 24h"))
    assert token
    address = re.search(r"macpool://\S+", facts["join"])
    assert address
    mini.start(f"echo {token[0]} | cluster join {address[0]} --token-file -").until(r"is in the pool of")
    until(lambda: states(studio).get("h2") == "ready", 40, "ready")
    key = re.search(r"mp_\S+", studio.type("cluster key create team-a --concurrency 2 --requests-per-minute 60"))
    assert key
    before = studio.type("cluster key limit team-a --concurrency 4")
    assert re.search(r"before.*concurrency=2.*after.*concurrency=4", before, re.DOTALL)
    assert "60" in studio.type("cluster key list"), "what was not named has stayed"
    studio.look("cluster key list")
    studio.look("cluster token list")
    # the administrator's own machine is not in the pool
    admin = re.search(r"mp_\S+", studio.type("cluster key create admin --scope admin"))
    assert admin
    fingerprint = facts["trust"].rpartition(" ")[2]
    desk.type(
        f"cluster login {facts['endpoint'].removesuffix('/v1')} --fingerprint {fingerprint} --key-file -",
        answer=f"{admin[0]}\n",
    )
    assert "h2" in desk.type("cluster nodes")
    desk.type("cluster node label h2 gpu=large")
    assert "team-a" in desk.type("cluster key list")
    desk.type("cluster audit")
    desk.type("cluster events --help")
    desk.type("cluster logout")
    # the coordinator moves to another machine
    studio.type("cluster backup pool.backup")
    backup = studio.host.folder / "pool.backup"
    assert backup.exists()
    up.interrupt()
    (spare.host.folder / "pool.backup").write_bytes(backup.read_bytes())
    spare.type("cluster restore pool.backup")
    moved, _ = begin_again(spare)
    until(lambda: states(spare).get("h2") == "ready", 60, "the node follows to the new address")
    spare.type("cluster key revoke team-a --yes")
    moved.interrupt()


@pytest.mark.nightly
def test_a_developer(people: list[Person]):
    """CI has the walk of the hobbyist, and these tests:

    - `tests/e2e/commands/test_manual.py::test_a_block_works_as_it_is_written`
    - `tests/unit/coordinator/cli/test_command_line.py::test_login_keeps_url_and_key_for_later_commands`
    """
    studio, _, _, desk = people
    up, facts = begin(studio)
    key = re.search(r"mp_\S+", studio.type("cluster key create my-editor"))
    assert key
    fingerprint = facts["trust"].rpartition(" ")[2]
    base = facts["endpoint"].removesuffix("/v1")
    desk.type(facts["trust"])
    desk.type(f"cluster login {base} --fingerprint {fingerprint} --key-file -", answer=f"{key[0]}\n")
    assert "Paris" in desk.type('cluster chat "What is the capital of France?"')
    lines = desk.type("cluster env")
    for line in lines.splitlines():
        found = re.fullmatch(r"export (\w+)=(.*)", line)
        if found:
            desk.variables[found[1]] = found[2].strip("'\"")
    desk.variables |= {"OPENAI_API_KEY": key[0], "ANTHROPIC_API_KEY": key[0]}
    assert desk.variables["OPENAI_BASE_URL"] == facts["endpoint"]
    assert "The capital of France is Paris." in desk.type(python(ASK))
    # mistakes of users
    curl = 'curl -sS -H "Authorization: Bearer $OPENAI_API_KEY" -H "x-request-id: mine-1"'
    said = desk.type(f"{curl} {base}/chat/completions -d '{{}}'")
    assert "/v1/chat/completions" in said
    assert "https://" in desk.type(f"curl -sS http://{base.partition('://')[2]}/v1/models")
    said = desk.type(f'{curl} {base}/v1/chat/completions -d \'{{"model":"none","messages":[]}}\'')
    assert "error" in said
    assert "mine-1" in studio.type("cluster explain mine-1")
    assert desk.type("cluster nodes", code=4), "a key without rights gets an error"
    up.interrupt()
