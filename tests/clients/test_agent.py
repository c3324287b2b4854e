"""An agent's traffic through both libraries: the page keeps its shape (and test_recorded works through both)."""

import json
import re

from jsonschema import Draft202012Validator

from tests.clients.agent import PAGE, REPORT, SESSIONS, STEPS, TOOLS

ROW = re.compile(r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| (\d+) \| [\d.]+ s \| (\w+) \| (?:`(\w+)`|report) `(.*)` \|$")
SCHEMAS = {tool["name"]: tool["parameters"] for tool in TOOLS} | {None: REPORT}
SECRET = re.compile(r"mp_\w{8}|Bearer|/tmp|/root|/home|127\.0\.0\.1|localhost|api[_-]key")


def parts(text: str) -> dict[str, str]:
    """Return each library's part of the page."""
    found = re.split(r"^## Through `(\w+)`$", text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def rows(part: str) -> list[tuple[str, ...]]:
    return [match.groups() for line in part.splitlines() if (match := ROW.match(line))]


def check(part: str, steps: tuple[str, ...]) -> None:
    """Compare a library's part with the statements of the page."""
    found = rows(part)
    assert [row[5] for row in found] == [*steps, None]
    for number, (at, prompt, cached, written, _, call, said) in enumerate(found, 1):
        assert int(at) == number
        assert int(written) > 0
        assert Draft202012Validator(SCHEMAS[call]).is_valid(json.loads(said)), said
        if 1 < number < len(found):
            assert int(cached.replace(",", "")) > 0.9 * int(prompt.replace(",", ""))
    assert len({row[4] for row in found[:-1]}) == 1, "a conversation stays where it is known"


def test_the_page_has_a_part_for_each_session():
    text = PAGE.read_text()
    assert parts(text).keys() == SESSIONS.keys()
    for part in parts(text).values():
        check(part, STEPS)
        assert len(re.findall(r"^(?:\{|\w+: \{)", part, re.MULTILINE)) >= 4, "events of the second turn"
    assert not SECRET.search(text)
