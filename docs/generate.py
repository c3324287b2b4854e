"""Generator of the manual's pages that follow from the code: settings, api, cli, metrics, modules (`make docs`).

The generator also writes example units, Prometheus files and the page's runbook. A test compares the committed files
with the output of this module.
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

from coordinator.alerts.rules import RULES, render_rules_file
from coordinator.cli import COMMANDS, cluster
from coordinator.metrics.families import MetricFamily
from coordinator.metrics.node_families import NODE
from coordinator.metrics.pool_families import POOL
from coordinator.metrics.scrape_config import render_configuration
from coordinator.service import launchd, systemd
from coordinator.service.plan import Role, ServicePlan
from coordinator.state.settings import CoordinatorSettings
from host.settings_loader import Setting, list_settings
from node.memory.cap import compute_safe_wired_limit
from node.settings import NodeSettings
from router.dialects.field_tables import TABLES
from router.dialects.shared.field_table import FieldTable
from tests.support.cluster.application import application
from wire.units import GIB, MIB

HERE = Path(__file__).parent
ROOMS = ("wire", "host", "router", "node", "coordinator", "simulation")
NOTICE = "<!-- Written by `make docs`. Do not edit. -->"

SETTINGS = f"""# Settings
{NOTICE}

Every setting has a default. Values come from `config.toml` in the state folder, from the environment, and from
`--set KEY=VALUE`. A later source overrides an earlier one. In the file, a key is a table and a name:

```toml
[memory]
cap = "96GiB"
```

In the environment, a key has the prefix `MACPOOL_`, capitals, and `__` instead of a dot: `MACPOOL_MEMORY__CAP=96GiB`.

An unknown setting or an invalid value ends the start with an error that names the nearest known setting. Coordinator
and node may share one file: each reads its own sections. Sizes are "96GiB", "12GB" or a number of bytes. A setting that
says so also accepts a share, such as "80%".
"""
API = f"""# HTTP API
{NOTICE}

Start with [examples](examples.md). The endpoint has OpenAI's and Anthropic's routes under `/v1`, and Ollama's under
`/api` ([dialects](dialects.md), [chat](chat.md)). The verbs of `cluster` that act on the pool are routes under
`/api/v1`; `/api/v1/openapi.json` describes them completely. Send the key as `Authorization: Bearer KEY` or
`x-api-key: KEY`, in every dialect.

A load, unload, verification or removal of a model can take minutes. With the header `Prefer: respond-async` it is
answered with 202 at once. The section `commands` of `GET /api/v1/live` has its end, or the reason of its failure, for
ten minutes.

Answers to requests that name an [alias](models.md#aliases-profiles-and-upstreams) have the header `X-Macpool-Model`,
and `X-Macpool-Upstream` if an upstream answered.

| scope | allows |
|---|---|
| `infer` | Requests to models |
| `metrics` | Reading the state of the pool |
| `admin` | Everything |

The routes:

| route | scope | what it does |
|---|---|---|
"""
PARAMETERS = """
# Parameters

Every field of a body is honoured, ignored because it has no effect here, or refused. A refusal is a 400 that names the
field (`unsupported_parameter`), unless its value is neutral. A field that is in no table is ignored, or refused with
`router.unknown_fields = "refuse"`. If its name is close to that of a known field, it counts as a typing error and is
always refused. The header `x-macpool-ignored` of the answer and `cluster explain` name the ignored fields and tools
([0029](decisions/0029-unknown-fields-and-tools.md)). Tests compare these tables with the types of the official
libraries.
"""
CLI = f"""# Command
{NOTICE}

The output of `cluster VERB --help` for every verb.
"""

METRICS = f"""# Metrics
{NOTICE}

How to scrape them: [monitoring](monitoring.md#metrics). Sizes are in bytes, times in seconds, shares from 0 to 1. All
values of a scrape are from one moment. Sums and differences are therefore valid:

    macpool_node_memory_headroom_bytes = ceiling - margin - current - reserved

Every label is from a closed set, or names a member, a valid API key, a model of a member, or an upstream. No label has
a request, the id or secret of a key, an address, or the text of an error. Histograms are classic: `le` has the buckets.
"""
_ABOUT_POOL = "At `/metrics`."
_ABOUT_NODE = """At `/prometheus/nodes/NODE`, from the node's newest report and its own measurements. They have no label
for the node, because service discovery adds `node` and `instance`. Counters of the gate and the engine restart with
every engine process. A node that does not answer has no metrics, and `up` is 0."""


def settings() -> str:
    """Return the page settings.md: all settings of coordinator and node."""
    page = SETTINGS
    for title, kind in (("Coordinator", CoordinatorSettings), ("Node", NodeSettings)):
        page += f"\n## {title}\n\n| key | default | meaning |\n|---|---|---|\n"
        page += "".join(_setting(setting) for setting in list_settings(kind))
    return page


def _setting(setting: Setting) -> str:
    return f"| `{setting.key}` | {_default(setting.default)} | {_cell(setting.description)} |\n"


def _default(value: object) -> str:
    """Render a default as TOML."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def api() -> str:
    """Return the page api.md: all routes, and how each field of a request body is treated."""
    listed = "".join(f"| `{method} {path}` | {scope} | {what} |\n" for method, path, scope, what in routes())
    return API + listed + PARAMETERS + "".join(_table(title, table) for title, table in TABLES.items())


def _table(title: str, table: FieldTable[Any]) -> str:
    lines = "".join(f"| `{row.name}` | {row.verdict} | {_cell(row.note)} |\n" for row in table.list_rows())
    return f"\n## {title}\n\n| field | treatment | note |\n|---|---|---|\n{lines}"


def routes() -> Iterator[tuple[str, str, str, str]]:
    """Yield method, path, scope and summary of every route in the OpenAPI document."""
    for path, operations in sorted(document()["paths"].items()):
        for method, operation in operations.items():
            yield method.upper(), path, operation.get("x-scope", "none"), _cell(operation["summary"].rstrip("."))


def document() -> dict[str, Any]:
    """Return the OpenAPI document that a new coordinator serves."""

    async def made() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            async with application(Path(folder)) as built:
                return built.document()

    return asyncio.run(made())


def cli() -> str:
    """Return the page cli.md: the help of every command."""
    page = CLI
    for path, context in contexts():
        page += f"\n## {' '.join(path)}\n\n```\n{context.get_help().rstrip()}\n```\n"
    return page


def contexts() -> Iterator[tuple[tuple[str, ...], click.Context]]:
    """Yield the words of every command (such as `cluster`, `key`, `list`), with a click context that prints its help.

    Groups come before their commands.
    """
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
    """Return the page metrics.md: all metrics of the coordinator and of a node."""
    page = METRICS
    for title, about, families in (("The coordinator", _ABOUT_POOL, POOL), ("A node", _ABOUT_NODE, NODE)):
        page += f"\n## {title}\n\n{about}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n"
        page += "".join(_family(family) for family in families)
    return page


def _family(family: MetricFamily[Any]) -> str:
    labels = "; ".join(f"`{name}`: {holds}" for name, holds in family.labels)
    when = f" Only {family.when}." if family.when else ""
    return f"| `{family.full_name}` | {family.kind} | {labels} | {_cell(family.meaning)}{when} |\n"


def prometheus() -> str:
    """Return the Prometheus configuration in deploy/prometheus, with an example of a coordinator's address."""
    note = "# Written by `make docs`. `cluster metrics-config` prints one for your own pool.\n"
    return note + render_configuration("https://192.168.1.5:8080", "macpool.token", "macpool-ca.pem")


def mac_service(role: Role) -> str:
    """Return a launchd job as `cluster service install` writes it, for the user `macpool`."""
    state = "/Library/Application Support/macpool"
    return launchd.render_property_list(launchd.build_job(_example(role, "/var/macpool", state)))


def linux_service(role: Role) -> str:
    """Return a systemd unit as `cluster service install` writes it, for the user `macpool`."""
    return systemd.render_unit(_example(role, "/var/lib/macpool", "/var/lib/macpool/state"))


def _example(role: Role, home: str, state: str) -> ServicePlan:
    return ServicePlan(role, "/opt/macpool/bin/python", "macpool", "macpool", home, state, launchd.LOGS)


def wired_limit() -> str:
    """Return the launchd job that sets Metal's wired limit, for a Mac with 128 GiB of RAM."""
    return launchd.render_property_list(launchd.build_wired_job(compute_safe_wired_limit("balanced", 128 * GIB) // MIB))


def runbook() -> str:
    """Return the JavaScript module with the sections of alerts.md about existing alerts.

    Links between pages become plain text.
    """
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
    """Return the page modules.md: the first paragraph of each module's docstring, by folder."""
    lines = [
        "# Modules",
        NOTICE,
        "",
        "The first line of each module, by folder. The rules between folders: [architecture](architecture.md).",
    ]
    for package in (*ROOMS, "dashboards", "deploy", "tests/support", "tests/bench"):
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
    "../deploy/prometheus/rules.yml": render_rules_file,
    "../deploy/prometheus/prometheus.yml": prometheus,
    "../deploy/launchd/coordinator/org.macpool.plist": partial(mac_service, "coordinator"),
    "../deploy/launchd/node/org.macpool.plist": partial(mac_service, "node"),
    "../deploy/launchd/org.macpool.wired-limit.plist": wired_limit,
    "../deploy/systemd/coordinator/macpool.service": partial(linux_service, "coordinator"),
    "../deploy/systemd/node/macpool.service": partial(linux_service, "node"),
}


def main() -> int:
    """Write all generated files, and print the names of changed ones. Return the exit code 0."""
    for name, write in PAGES.items():
        file, page = HERE / name, write()
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != page:
            file.write_text(page)
            print(f"wrote {file.resolve().relative_to(HERE.resolve().parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
