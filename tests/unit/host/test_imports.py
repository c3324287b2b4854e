"""Imports during which no garbage is collected, and those that do not load rich."""

import gc
import subprocess
import sys
from importlib import import_module

import pytest

from host.imports import pause_collection
from tests.support.processes import ROOT, environment

COLLECTS = """
import gc, sys
collected = []
gc.callbacks.append(lambda phase, info: collected.append(info["generation"]))
from importlib import import_module
from host.imports import pause_collection
collected.clear()
with pause_collection():
    import_module(sys.argv[1])
print(len(collected), gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_an_import_collects_nothing_and_its_objects_are_excluded():
    command = [sys.executable, "-c", COLLECTS, "fastapi"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "0 True True\n"


def test_collection_is_enabled_after_an_import_that_fails():
    with pytest.raises(ImportError), pause_collection():
        import_module("nothing_of_this_name")
    assert gc.isenabled()


def test_collection_that_is_disabled_stays_disabled():
    gc.disable()
    try:
        with pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


PROGRAM = """
import sys
{first}
print(sorted({{"rich", "structlog"}} & set(sys.modules)))
import rich.console
"""


@pytest.mark.parametrize(
    "first",
    ["import node.run", "from host.imports import import_structlog; import_structlog()"],
    ids=["node", "function"],
)
def test_structlog_is_imported_without_rich_which_can_be_imported_later(first: str) -> None:
    command = [sys.executable, "-P", "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['structlog']\n"
