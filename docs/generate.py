"""Writes the pages of the manual that follow from the code: settings, api, cli, metrics, modules. Run by `make docs`.

A test compares the committed pages with what this gives, so they cannot fall behind.
"""

import ast
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from coordinator.alerts.rules import RULES, rules_file
from coordinator.cli import COMMANDS, cluster
from coordinator.metrics.families import Family
from coordinator.metrics.node import NODE
from coordinator.metrics.pool import POOL
from coordinator.metrics.prometheus import configuration
from coordinator.service import launchd, systemd
from coordinator.service.plan import Plan, Role
from coordinator.state.settings import CoordinatorSettings
from host.settings_loader import PREFIX, Setting, describe
from node.memory.cap import safe_wired_limit
from node.settings import NodeSettings
from router.dialects.field_tables import TABLES
from router.dialects.shared.field_table import Parameters
from tests.support.application import application
from wire.units import GIB, MIB

HERE = Path(__file__).parent
ROOMS = ("wire", "host", "router", "node", "coordinator")
NOTICE = "<!-- Written by `make docs`. Do not edit. -->"

SETTINGS = f"""# Settings
{NOTICE}

Every setting has a default, and none is needed to begin. They come from `config.toml` in the state folder, from the
environment, and from `--set KEY=VALUE`; the later wins over the earlier. In the file a key is a table and a name:

```toml
[memory]
cap = "96GiB"
```

An unknown setting, or a value that is not possible, ends the start with the name of the nearest known one. Coordinator
and node may share one file: each reads its own sections. Sizes are "96GiB", "12GB" or a number of bytes, and a share as
"80%" where that is said.
"""
API = f"""# HTTP API
{NOTICE}

First [by example](examples.md). The endpoint speaks OpenAI's dialects and Anthropic's under `/v1`, and Ollama's under
`/api`: how, is in [dialects](dialects.md), and more about chats in [chat](chat.md). The verbs of `cluster` that act on
the pool are routes under `/api/v1`, described whole at `/api/v1/openapi.json`. Send the key as `Authorization: Bearer
KEY` or `x-api-key: KEY`, in every dialect. A key of the scope `admin` may do everything; `metrics` may read the state
of the pool; `infer` may use the models.

| route | scope | what it does |
|---|---|---|
"""
PARAMETERS = """
# Parameters

Every field of every body: it is honoured, or it is ignored because it changes nothing here, or it is refused with a 400
that names it (`unsupported_parameter`) unless it has a value that asks for nothing. A field that is in no table is
ignored, or refused with `router.unknown_fields = "refuse"`; one whose name is nearly that of a field here is a typing
error and refused always. What was ignored of a request, tools included, is named in the header `x-macpool-ignored` of
its answer and by `cluster explain` ([0029](decisions/0029-unknown-fields-and-tools.md)). Tests hold these tables
against the official libraries' own types.
"""
CLI = f"""# Command
{NOTICE}

`cluster VERB --help`, of every verb.
"""

METRICS = f"""# Metrics
{NOTICE}

How to scrape them, and what to look at first: [monitoring](monitoring.md#metrics). Sizes are bytes, times seconds,
shares 0 to 1. A scrape is one picture of one moment, so sums and differences over it mean something:

    macpool_node_memory_headroom_bytes = ceiling - margin - current - reserved

Every label is from a closed set, or names a member, an API key in force, or a model that some member has. There is
never one for a request, an id or a secret of a key, an address or the text of an error. Histograms are classic ones:
their buckets are in the series' `le`.
"""
_ABOUT_POOL = "At `/metrics`."
_ABOUT_NODE = """At `/prometheus/nodes/NODE`, made from the node's newest report and from what it measures itself. They
carry no label for the node: service discovery attaches `node` and `instance`. Counters of the gate and the engine begin
anew with every engine process. A node that cannot be asked has no metrics at all, and `up` is 0."""


def settings() -> str:
    """Write settings.md."""
    page = SETTINGS
    for title, kind in (("Coordinator", CoordinatorSettings), ("Node", NodeSettings)):
        page += f"\n## {title}\n\n| key | default | meaning | environment |\n|---|---|---|---|\n"
        page += "".join(_setting(setting) for setting in describe(kind))
    return page


def _setting(setting: Setting) -> str:
    environment = PREFIX + setting.key.upper().replace(".", "__")
    return f"| `{setting.key}` | {_default(setting.default)} | {_cell(setting.description)} | `{environment}` |\n"


def _default(value: object) -> str:
    """Write a default as it stands in TOML."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def api() -> str:
    """Write api.md."""
    listed = "".join(f"| `{method} {path}` | {scope} | {what} |\n" for method, path, scope, what in routes())
    return API + listed + PARAMETERS + "".join(_table(title, table) for title, table in TABLES.items())


def _table(title: str, table: Parameters[Any]) -> str:
    lines = "".join(f"| `{row.name}` | {row.verdict} | {_cell(row.note)} |\n" for row in table.rows())
    return f"\n## {title}\n\n| field | treatment | note |\n|---|---|---|\n{lines}"


def routes() -> Iterator[tuple[str, str, str, str]]:
    """Give method, path, scope and summary of every documented route."""
    for path, operations in sorted(document()["paths"].items()):
        for method, operation in operations.items():
            yield method.upper(), path, operation.get("x-scope", "none"), _cell(operation["summary"].rstrip("."))


def document() -> dict[str, Any]:
    """Give the OpenAPI document of a coordinator that was just made."""

    async def made() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            async with application(Path(folder)) as built:
                return built.document()

    return asyncio.run(made())


def cli() -> str:
    """Write cli.md."""
    page = CLI
    for path, context in contexts():
        page += f"\n## {' '.join(path)}\n\n```\n{context.get_help().rstrip()}\n```\n"
    return page


def contexts() -> Iterator[tuple[tuple[str, ...], click.Context]]:
    """Give every verb as its words, groups before their own verbs, each with a context that prints its help."""
    root = click.Context(
        cluster, info_name="cluster", terminal_width=100, max_content_width=100, **cluster.context_settings
    )
    yield ("cluster",), root
    for name in COMMANDS:
        verb = cluster.get_command(root, name)
        assert verb is not None, name  # noqa: S101  the table names it
        yield from _below(("cluster", name), click.Context(verb, parent=root, info_name=name))


def _below(path: tuple[str, ...], context: click.Context) -> Iterator[tuple[tuple[str, ...], click.Context]]:
    yield path, context
    if isinstance(context.command, click.Group):
        for name, verb in sorted(context.command.commands.items()):
            yield from _below((*path, name), click.Context(verb, parent=context, info_name=name))


def metrics() -> str:
    """Write metrics.md."""
    page = METRICS
    for title, about, families in (("The coordinator", _ABOUT_POOL, POOL), ("A node", _ABOUT_NODE, NODE)):
        page += f"\n## {title}\n\n{about}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n"
        page += "".join(_family(family) for family in families)
    return page


def _family(family: Family[Any]) -> str:
    labels = "; ".join(f"`{name}`: {holds}" for name, holds in family.labels)
    when = f" Only {family.when}." if family.when else ""
    return f"| `{family.full_name}` | {family.kind} | {labels} | {_cell(family.meaning)}{when} |\n"


def prometheus() -> str:
    """Write the Prometheus configuration of deploy/: for its compose file, and a coordinator on the same machine."""
    note = "# Written by `make docs`. `cluster metrics-config` prints one for your own pool.\n"
    return note + configuration("https://192.168.1.5:8080", "macpool.token", "macpool-ca.pem")


def mac_service(role: Role) -> str:
    """Write a job of launchd as `cluster service install` writes it, for a user `macpool`."""
    state = "/Library/Application Support/macpool"
    return launchd.text(launchd.job(_example(role, "/var/macpool", state)))


def linux_service(role: Role) -> str:
    """Write a unit of systemd, likewise."""
    return systemd.unit(_example(role, "/var/lib/macpool", "/var/lib/macpool/state"))


def _example(role: Role, home: str, state: str) -> Plan:
    return Plan(role, "/opt/macpool/bin/python", "macpool", "macpool", home, state, launchd.LOGS)


def wired_limit() -> str:
    """Write the job of the wired limit, for a Mac with 128 GiB."""
    return launchd.text(launchd.wired_job(safe_wired_limit("balanced", 128 * GIB) // MIB))


def runbook() -> str:
    """Write the runbook's entries as the page shows them, from alerts.md; links between pages become text."""
    entries = re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", (HERE / "alerts.md").read_text(), re.MULTILINE | re.DOTALL)
    names = {rule.name for rule in RULES}
    texts = {
        name: re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text.strip())
        for name, text in entries
        if name in names
    }
    return (
        "// Written by `make docs` from docs/alerts.md. Do not edit.\n"
        f"export const RUNBOOK = {json.dumps(texts, indent=2, ensure_ascii=False)};\n"
    )


def modules() -> str:
    """Return the page with the first line of each module, by folder."""
    lines = [
        "# Modules",
        NOTICE,
        "",
        "The first line of each module, by folder. The rules between folders: [architecture](architecture.md).",
    ]
    for package in ROOMS:
        for folder in sorted({file.parent for file in (HERE.parent / package).rglob("*.py")}):
            place = folder.relative_to(HERE.parent).as_posix()
            lines += [
                "",
                f"## {place}",
                "",
                _first_line(folder / "__init__.py"),
                "",
                "| module | first line |",
                "|---|---|",
            ]
            files = [file for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]
            lines += [f"| `{file.name}` | {_first_line(file)} |" for file in files]
    return "\n".join(lines) + "\n"


def _first_line(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|").strip()


PAGES = {
    "../coordinator/ui/static/runbook.js": runbook,
    "modules.md": modules,
    "settings.md": settings,
    "api.md": api,
    "cli.md": cli,
    "metrics.md": metrics,
    "../deploy/prometheus/rules.yml": rules_file,
    "../deploy/prometheus/prometheus.yml": prometheus,
    "../deploy/launchd/coordinator/org.macpool.plist": partial(mac_service, "coordinator"),
    "../deploy/launchd/node/org.macpool.plist": partial(mac_service, "node"),
    "../deploy/launchd/org.macpool.wired-limit.plist": wired_limit,
    "../deploy/systemd/coordinator/macpool.service": partial(linux_service, "coordinator"),
    "../deploy/systemd/node/macpool.service": partial(linux_service, "node"),
}


def main() -> int:
    """Write every page and say which changed."""
    for name, write in PAGES.items():
        file, page = HERE / name, write()
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != page:
            file.write_text(page)
            print(f"docs/{name} is new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
