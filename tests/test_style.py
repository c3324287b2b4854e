"""The check of docs/style.md."""

from pathlib import Path

import pytest

from docs.function_names import RULES, NameRules, find_misnamed, find_needless_exceptions
from docs.style_check import PACKAGES, ROOT, Text, findings, of_file, of_markdown, of_python, reads_as_prose, room_of

SOURCE = '''
"""Hold what waits."""
LIMIT = 1
"""The most of it."""
def one() -> None:
    """Give the row."""
    # a request that waits
    # for somebody else
    raise ValueError("the owner was told about his limit")
'''


def rules(prose: str, **how: bool) -> list[str]:
    return [one.rule for one in findings("a.py", iter([Text(1, prose, **how)]))]


@pytest.mark.parametrize(
    ("prose", "rule"),
    [
        ("Return what waits.", "clause"),
        ("Who asks is answered.", "clause"),
        ("It is full, so no request is sent.", "filler"),
        ("The queue is full, too.", "filler"),
        ("The request goes on.", "filler"),
        ("The key has his limit.", "subject"),
        ("The node told the router.", "dialect"),
        ("One " + "word " * 25 + "end.", "long"),
    ],
)
def test_findings_name_the_rule_that_a_sentence_breaks(prose: str, rule: str):
    assert rules(prose) == [rule]


@pytest.mark.parametrize(
    "prose",
    [
        "What is a node?",
        "Too many requests.",
        "It is sent so that the node answers.",
        "The person who owns the Mac.",
        "`what waits` is a name.",
        "The error says what to do.",
    ],
)
def test_findings_leave_out_questions_names_and_common_phrases(prose: str):
    assert rules(prose) == []


def test_findings_look_at_the_first_word_of_docstrings_alone():
    assert rules("Give the row.", docstring=True) == ["verb"]
    assert rules("Give the row.") == []


def test_of_python_yields_docstrings_comments_and_texts_for_people():
    found = list(findings("a.py", of_python(SOURCE, strings=True)))
    assert [(one.line, one.rule) for one in found] == [
        (2, "clause"),
        (6, "verb"),
        (9, "subject"),
        (9, "dialect"),
        (7, "subject"),
    ]
    assert len(list(findings("a.py", of_python(SOURCE, strings=False)))) == 3


def test_of_markdown_leaves_code_out_and_counts_each_item():
    text = "# What is here\n\n```\nwhat waits\n```\n- a row, so long\n- a\n  request, too\n\n| of what waits | b |\n"
    assert [(one.line, one.rule) for one in findings("a.md", of_markdown(text))] == [
        (1, "clause"),
        (6, "filler"),
        (7, "filler"),
        (10, "clause"),
    ]


def test_reads_as_prose_leaves_out_names_and_patterns():
    assert reads_as_prose("the body is not usable")
    assert not reads_as_prose("content-length: {a}/{b}/{c}: [d] (e)")
    assert not reads_as_prose("too short")


@pytest.mark.parametrize(
    ("file", "room"), [("README.md", "top"), ("wire/a.py", "wire"), ("node/engine/b/c.py", "node/engine")]
)
def test_room_of_is_the_package_with_its_first_folder(file: str, room: str):
    assert room_of(file) == room


MODULE = """
class Queue:
    @property
    def head(self): ...
    def __len__(self): ...
    def add(self, item): ...
    def is_full(self): ...
    def connection_lost(self, error): ...
    def _waiting(self):
        def loss(item): ...
    async def told(self): ...

class QueueRoutes:
    def entries(self): ...
    def _rows(self): ...

@group.command("show")
def queue(): ...

def length_of(queue): ...
"""
NAMES = NameRules(
    verbs=frozenset({"add"}),
    auxiliaries=frozenset({"is"}),
    framework=frozenset({"connection_lost"}),
    unchecked=("router/old/",),
    exceptions=frozenset({"router.queue.length_of"}),
)
MAX_EXCEPTIONS, MAX_UNCHECKED = 26, 15
MISNAMED = ["router.queue.Queue._waiting", "router.queue.Queue._waiting.loss", "router.queue.Queue.told"]


def test_names_without_a_verb_are_found():
    assert [name for _, name in find_misnamed("router/queue.py", MODULE, NAMES)] == [
        *MISNAMED,
        "router.queue.QueueRoutes._rows",
    ]
    assert next(find_misnamed("router/queue.py", MODULE, NAMES))[0] == 9


def test_names_in_unchecked_packages_are_not_found():
    assert list(find_misnamed("router/old/queue.py", MODULE, NAMES)) == []


def test_an_exception_that_no_function_needs_is_named():
    rules = NameRules(NAMES.verbs, NAMES.auxiliaries, NAMES.framework, (), frozenset({"a.told", "a.gone"}))
    assert find_needless_exceptions({"a.py": "def told(): ..."}, rules) == ["a.gone"]


def test_names_of_functions_are_part_of_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "router" / "queue.py"
    file.parent.mkdir()
    file.write_text("def told():\n    ...\n")
    monkeypatch.setattr("docs.style_check.ROOT", tmp_path)
    assert [(one.line, one.rule, one.excerpt) for one in of_file(file)] == [(1, "name", "router.queue.told")]


def test_exceptions_and_unchecked_packages_only_shrink():
    assert len(RULES.exceptions) <= MAX_EXCEPTIONS, "give the function a verb instead"
    assert len(RULES.unchecked) <= MAX_UNCHECKED
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    assert find_needless_exceptions(sources) == [], "remove these exceptions"
    assert [part for part in RULES.unchecked if not any(file.startswith(part) for file in sources)] == []
