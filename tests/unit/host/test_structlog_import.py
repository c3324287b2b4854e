"""Processes of the pool do not load rich, but a command still can."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{first}
print(sorted({{"rich", "structlog"}} & set(sys.modules)))
import rich.console
"""


@pytest.mark.parametrize(
    "first",
    ["import node.run", "from host.structlog_import import import_structlog; import_structlog()"],
    ids=["node", "function"],
)
def test_structlog_is_imported_without_rich_which_can_be_imported_later(first: str) -> None:
    command = [sys.executable, "-P", "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['structlog']\n"
