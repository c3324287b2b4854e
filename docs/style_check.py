"""Count of the places where prose and names break the rules of docs/style.md. `make lint` runs this check.

The check covers docstrings, comments, texts that a person sees (errors, help, the page) and Markdown files. In the
packages it also covers the names of functions (`docs.function_names`). Each room (a package, or a folder of one) has a
number of findings in docs/style_counts.toml that may only fall:

    python -m docs.style_check                 # fail where a room has more findings than its number
    python -m docs.style_check router docs     # list the findings of these rooms or files
    python -m docs.style_check --write         # lower the numbers to the findings of today
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import cast

from docs.function_names import find_misnamed

ROOT = Path(__file__).parents[1]
COUNTS = Path(__file__).with_name("style_counts.toml")
PACKAGES = ("coordinator", "host", "node", "router", "simulation", "wire")
OTHERS = ("dashboards", "deploy", "docs", "tests")
UNCHECKED = (
    "docs/api.md",
    "docs/cli.md",
    "docs/metrics.md",
    "docs/modules.md",
    "docs/settings.md",
    "docs/style.md",
    "coordinator/ui/static/vendor",
)
"""Files that are generated from checked ones, quote the forbidden words, or come from other projects."""
MAX_WORDS = 25
"""Maximum words of a sentence."""
MAX_SHOWN = 40
"""Maximum findings of a room that are printed on failure."""
VERBS = re.compile(r"\s*(?:give|say|take in|let|hear|tell|look|note|see)\b", re.IGNORECASE)
"""Forbidden first words of a docstring: rule 1."""
SIZES = (
    "big|busy|close|costly|deep|early|far|fast|few|great|high|large|late|little|long|low|many|much|new|often|old|short|slow|"
    "small|soon|wide"
)
RULES: Mapping[str, re.Pattern[str]] = {
    "clause": re.compile(
        r"\bwhat\b(?! to\b)|(?:^|[,;:(]\s+|\b(?:and|as|at|beside|by|for|from|if|of|on|or|than|that|to|with)\s+)who\b",
        re.IGNORECASE,
    ),
    "filler": re.compile(
        r"\b(?:anew|whoever|whatever|of late|for ever|by itself|by themselves|beside|in any case|"
        rf"go(?:es|ing)? on|went on|as of now)\b|\bso\b(?! (?:that|far)\b)|\btoo\b(?! (?:\w+ )?(?:{SIZES})\b)",
        re.IGNORECASE,
    ),
    "subject": re.compile(
        r"\b(?:he|him|his|himself|she|her|somebody|someone|nobody|anybody|everybody|one another|others)\b",
        re.IGNORECASE,
    ),
    "dialect": re.compile(
        r"\b(?:told|heard|spoken|unread|doors?|shelf|shelves|stories|voices?|conductors?|papers?|lives|in hand)\b",
        re.IGNORECASE,
    ),
}
"""Pattern of each finding, for the rules 3, 4, 5, and 2 with 9 of docs/style.md."""
ITEM = re.compile(r"\n\s*(?:-|\d+\.)\s+")
"""Start of an item of a list, with which a sentence begins."""
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"(])|\0")
STRING_OR_COMMENT = re.compile(
    r"""'''(?:\\.|.)*?'''|\"\"\"(?:\\.|.)*?\"\"\"|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|(?P<comment>#[^\n]*)""",
    re.DOTALL,
)
"""Next string or comment of a module. A tokenizer takes ten times as long."""
NO_PROSE = re.compile(r"#\s*(?:noqa|type:|pyright:|fmt:|!)")
"""Start of a comment for a tool."""
WORD = re.compile(r"[A-Za-z][\w'’-]*")


@dataclass(frozen=True, slots=True)
class Text:
    """Prose of one place in a file."""

    line: int
    """Line number in the file, from 1."""
    prose: str
    docstring: bool = False
    """Whether the text is the docstring of a function, whose first word is checked."""
    whole: bool = True
    """Whether the text consists of complete sentences, whose length is checked."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Place in a file at which the text breaks one rule."""

    file: str
    """Path in the repository."""
    line: int
    rule: str
    """Key in `RULES`, or `verb`, `long` or `name`."""
    excerpt: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.excerpt}"


def of_python(source: str, *, strings: bool) -> Iterator[Text]:
    """Yield the docstrings and comments in the source of a module, and with `strings` also its texts for people."""
    documented, constants = set[int](), list[ast.Constant]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant):
            constants.append(node)
            continue
        body: object = getattr(node, "body", None)
        for at, one in enumerate(cast("list[object]", body) if isinstance(body, list) else []):
            value = one.value if isinstance(one, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                documented.add(id(value))
                function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and at == 0
                text = re.sub(r"^ {4,}.*$", "", cleandoc(value.value), flags=re.MULTILINE)  # literal blocks
                yield Text(value.lineno, text, docstring=function)
    if strings:
        for constant in constants:
            text = constant.value if id(constant) not in documented else None
            if isinstance(text, str) and reads_as_prose(text):
                yield Text(constant.lineno, text, whole=False)
    yield from _comments(source)


def _comments(source: str) -> Iterator[Text]:
    """Yield comments, those of adjacent lines as one text."""
    first, last, parts = 0, 0, list[str]()
    line, end = 1, 0
    for found in STRING_OR_COMMENT.finditer(source):
        line, end = line + source.count("\n", end, found.start()), found.start()
        comment = found["comment"]
        if comment is None or NO_PROSE.match(comment):
            continue
        if parts and line == last + 1:
            parts.append(comment.lstrip("# "))
        else:
            if parts:
                yield Text(first, " ".join(parts))
            first, parts = line, [comment.lstrip("# ")]
        last = line
    if parts:
        yield Text(first, " ".join(parts))


def reads_as_prose(text: str) -> bool:
    """Return whether a string is a text for people.

    Such a text is one line with at least four words, and 85 % of it are letters, blanks, commas, full stops and
    apostrophes.
    """
    letters = sum(one.isalpha() or one in " ,.'" for one in text)
    return len(WORD.findall(text)) >= 4 and letters >= 0.85 * len(text) and "\n" not in text.strip()


def of_script(source: str) -> Iterator[Text]:
    """Yield the comments and texts for people in the source of a JavaScript or HTML file of the page."""
    for number, line in enumerate(source.splitlines(), 1):
        for found in re.finditer(r"//\s(.*)|\"([^\"]+)\"|'([^']+)'|`([^`]+)`|>([^<>{}$]+)<", line):
            text = next(part for part in found.groups() if part is not None)
            if len(WORD.findall(text)) >= 2:
                yield Text(number, text, whole=bool(found.group(1)))


def of_markdown(source: str) -> Iterator[Text]:
    """Yield the paragraphs, list items and table rows of a Markdown page, without code blocks."""
    source = re.sub(r"^```.*?^```", lambda found: "\n" * found[0].count("\n"), source, flags=re.DOTALL | re.MULTILINE)
    source = re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), source, flags=re.DOTALL)
    first, parts = 0, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        starts = re.match(r"\s*(?:[-*+]|\d+\.|#+|\||>)\s*", line)
        if parts and (not line.strip() or starts):
            yield Text(first, " ".join(parts))
            parts = []
        if line.strip():
            first = number if not parts else first
            parts.append(line[starts.end() :].replace("|", ". ") if starts else line.strip())


def findings(file: str, texts: Iterator[Text]) -> Iterator[Finding]:
    """Yield the places where texts of the file with the path `file` break a rule."""
    for text in texts:
        prose = re.sub(r"``?[^`]*``?|https?://\S+", "X", re.sub(r"\]\([^)]*\)|\*\*", " ", text.prose))
        if text.docstring and VERBS.match(prose):
            yield Finding(file, text.line, "verb", text.prose.strip()[:60])
        for sentence in SENTENCE.split(" ".join(ITEM.sub("\0", prose).split())):
            if sentence.endswith("?"):
                continue
            for rule, pattern in RULES.items():
                for found in pattern.finditer(sentence):
                    yield Finding(file, text.line, rule, sentence[max(0, found.start() - 25) : found.end() + 25])
            if text.whole and len(WORD.findall(sentence)) > MAX_WORDS:
                yield Finding(file, text.line, "long", f"{len(WORD.findall(sentence))} words: {sentence[:60]}")


def of_file(path: Path) -> list[Finding]:
    """Return the findings in a Python, Markdown, JavaScript or HTML file of the repository."""
    name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        packaged = name.partition("/")[0] in PACKAGES
        misnamed = find_misnamed(name, source) if packaged else ()
        return [
            *findings(name, of_python(source, strings=packaged)),
            *(Finding(name, line, "name", function) for line, function in misnamed),
        ]
    return list(findings(name, of_markdown(source) if path.suffix == ".md" else of_script(source)))


def files() -> Iterator[Path]:
    """Yield the paths of all files that are checked."""
    top = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
    below = (path for folder in (*PACKAGES, *OTHERS) for path in (ROOT / folder).rglob("*"))
    for path in sorted([*top, *below]):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".py", ".md", ".js", ".html") and not name.startswith(UNCHECKED):
            yield path


def room_of(name: str) -> str:
    """Return the room of a file by its path in the repository: its first two folders; `top` for a file without one."""
    parts = name.split("/")[:-1]
    return "/".join(parts[:2]) or "top"


def counts(found: list[Finding]) -> Counter[str]:
    """Return the number of findings by room (`room_of`)."""
    return Counter(room_of(one.file) for one in found)


def main(arguments: list[str]) -> int:
    """Check all files, list the findings below given paths, or write the numbers with `--write`.

    Return the exit code. Without arguments, it is 1 if a room (`room_of`) has more findings than its number in
    docs/style_counts.toml. With paths, it is 1 if there is a finding. Otherwise it is 0.
    """
    if arguments and arguments != ["--write"]:
        chosen = [path for path in files() if path.relative_to(ROOT).as_posix().startswith(tuple(arguments))]
        wanted = [one for path in chosen for one in of_file(path)]
        print(*wanted, f"{len(wanted)} findings", sep="\n")
        return 1 if wanted else 0
    found = [one for path in files() for one in of_file(path)]
    now = counts(found)
    most: dict[str, int] = tomllib.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    if arguments:
        rooms = {room_of(path.relative_to(ROOT).as_posix()) for path in files()}
        lower = {room: min(now[room], most.get(room, now[room])) for room in sorted(rooms)}
        COUNTS.write_text("".join(f'"{room}" = {count}\n' for room, count in lower.items()))
        return 0
    worse = [room for room in now if now[room] > most.get(room, 0)]
    for room in worse:
        print(f"{room}: {now[room]} findings, at most {most.get(room, 0)}: python -m docs.style_check {room}")
        print(*[f"  {one}" for one in found if room_of(one.file) == room][:MAX_SHOWN], sep="\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
