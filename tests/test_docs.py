"""The generated pages of the manual equal what the code gives, and say something about everything."""

import re
from pathlib import Path

import pytest

from coordinator.settings import OTHERS, CoordinatorSettings
from docs.generate import HERE, PAGES
from node.settings import SECTIONS, NodeSettings
from wire.settings import describe

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str):
    assert (HERE / name).read_text() == PAGES[name](), f"docs/{name} is not what the code says now: run `make docs`"


@pytest.mark.parametrize("kind", [CoordinatorSettings, NodeSettings])
def test_every_setting_has_a_meaning(kind: type):
    assert [setting.key for setting in describe(kind) if len(setting.description) < 10] == []


def test_each_section_belongs_to_one_process():
    coordinators = {setting.key.split(".")[0] for setting in describe(CoordinatorSettings)}
    assert not coordinators & SECTIONS
    assert OTHERS == SECTIONS


def test_every_page_that_is_linked_exists():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text())]
    assert len(links) > 5
    missing = [(page.name, target) for page, target in links if not (page.parent / target).exists()]
    assert missing == []
