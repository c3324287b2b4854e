"""Scripts of scenarios: lines with an event, each followed by its expected results, indented. `#` begins a comment."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path


def play_script(script: str, do: Callable[[str], Iterable[str]]) -> str:
    """Return the script with the results of every event. `do` applies the event of a line and returns its results."""
    lines: list[str] = []
    for line in script.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += ["    " + result for result in do(line)]
    return "\n".join(lines) + "\n"


def check_script(path: Path, play: Callable[[str], str]) -> None:
    """Compare the results in a file with the actual ones. With MACPOOL_REWRITE set, write the actual ones first."""
    script = path.read_text()
    actual = play(script)
    if os.environ.get("MACPOOL_REWRITE"):
        path.write_text(actual)
    assert actual == script
