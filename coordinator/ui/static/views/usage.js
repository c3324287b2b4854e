// Tokens and requests by day: a chart, a table and a CSV file; of one key for its user, of all keys for an administrator.
import { html, useMemo, useState } from "/ui/vendor/preact.js";
import { Bars } from "/ui/chart.js";
import { Nothing, Table, Wrong, count, download, useAsked, when } from "/ui/shared.js";

const DAY_MS = 86400000;
const SPANS = [["7", "7 days"], ["30", "30 days"], ["90", "90 days"], ["365", "1 year"]];
const COLUMNS = ["day", "key", "name", "model", "requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens"];
const SUMS = ["requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens"];

const dayOf = (ms) => new Date(ms).toISOString().slice(0, 10);

// A cell of a CSV file. A text that a spreadsheet would take for a formula gets an apostrophe.
function cell(value) {
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const csv = (rows) => [COLUMNS, ...rows.map((row) => COLUMNS.map((name) => row[name]))].map((cells) => cells.map(cell).join(",")).join("\r\n") + "\r\n";

function sumsBy(rows, name) {
  const found = new Map();
  for (const row of rows) {
    const sum = found.get(name(row)) ?? { ...row, requests: 0, failed: 0, prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0 };
    for (const column of SUMS) sum[column] += row[column];
    found.set(name(row), sum);
  }
  return [...found.values()];
}

// Sums of the rows of `usage`: of `key`, or of all keys without one. `names` has the names of all keys.
function addUp(usage, key, days) {
  const all = usage?.usage ?? [];
  const rows = all.filter((row) => !key || row.key === key);
  const names = new Map(all.map((row) => [row.key, row.name || `${row.key} (ended)`]));
  const daily = new Map(sumsBy(rows, (row) => row.day).map((row) => [row.day, row]));
  const values = (name) => days.map((day) => name(daily.get(day) ?? { prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0 }));
  const parts = [
    { name: "prompt", kind: "reserved", values: values((row) => row.prompt_tokens - row.cached_tokens) },
    { name: "cached", kind: "margin", values: values((row) => row.cached_tokens) },
    { name: "generated", kind: "current", values: values((row) => row.completion_tokens) },
  ];
  const sums = sumsBy(rows, (row) => `${row.key} ${row.model}`).sort((a, b) => b.completion_tokens + b.prompt_tokens - a.completion_tokens - a.prompt_tokens);
  return { rows, names, parts, sums };
}

export function Usage({ path, keys }) {
  const [span, setSpan] = useState("30");
  const [key, setKey] = useState("");
  const days = Array.from({ length: Number(span) }, (_, at) => dayOf(Date.now() - (Number(span) - 1 - at) * DAY_MS));
  const [usage, error] = useAsked(`${path}?daily=true&since=${days[0]}`);
  const { rows, names, parts, sums } = useMemo(() => addUp(usage, key, days), [usage, key, days[0], days.at(-1)]);
  return html`<section class="card" aria-label="Usage by day"><h3>Usage by day</h3>
    <p class="row"><select aria-label="Days shown" value=${span} onChange=${(event) => setSpan(event.target.value)}>${SPANS.map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select>
      ${keys ? html`<select aria-label="Key shown" value=${key} onChange=${(event) => setKey(event.target.value)}><option value="">all keys</option>${[...names].map(([id, name]) => html`<option value=${id}>${name}</option>`)}</select>` : null}
      <button disabled=${!rows.length} onClick=${() => download(`macpool-usage-${days[0]}.csv`, "text/csv", csv(rows))}>Download CSV</button></p><${Wrong} text=${error} />
    ${rows.length ? html`<${Bars} title="Tokens" labels=${days} parts=${parts} shown=${count} />
      <p class="tiny row">${parts.map((one) => html`<span><span class=${`key ${one.kind}`}></span>${one.name}</span>`)}<span class="quiet">days in UTC</span></p>
      <${Table} caption="Usage" head=${[...(keys ? ["key"] : []), "model", "#requests", "#failed", "#prompt", "#cached", "#generated"]}
        rows=${sums.map((row) => ({ key: row.key + row.model, cells: [...(keys ? [names.get(row.key)] : []), row.model || "(no model)", ...SUMS.map((name) => count(row[name]))] }))} />`
      : html`<${Nothing}>${usage ? "No usage in this period." : "Loading …"}<//>`}</section>`;
}

export const limitsText = (limits) => Object.entries(limits).filter(([, value]) => value !== null && value !== undefined && value.length !== 0)
  .map(([name, value]) => `${name.replaceAll("_", " ")}: ${Array.isArray(value) ? value.join(", ") : value}`).join("; ") || "none";

export function OwnUsage({ own }) {
  return html`<section class="card" aria-label="Your key"><h3>Your key</h3><dl class="facts"><dt>name</dt><dd>${own.name}</dd><dt>scopes</dt><dd>${own.scopes.join(", ")}</dd>
      <dt>expires</dt><dd>${when(own.expires)}</dd><dt>limits</dt><dd>${limitsText(own.limits)}</dd></dl></section>
    <${Usage} path="/api/v1/usage" />`;
}
