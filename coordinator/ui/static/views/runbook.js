// Runbook entry of a condition: meaning and next step. Alerts link to this view.
import { html } from "/ui/vendor/preact.js";
import { markdown } from "/ui/markdown.js";
import { Nothing } from "/ui/shared.js";
import { RUNBOOK } from "/ui/runbook.js";

export function Runbook({ pool, rest }) {
  const name = rest[0] ?? "";
  const now = (pool.conditions ?? []).filter((one) => one.name === name);
  const names = Object.keys(RUNBOOK);
  if (!names.includes(name)) return html`<section class="card"><ul>${names.map((one) => html`<li><a href=${`#/runbook/${one}`}>${one}</a></li>`)}</ul></section>`;
  return html`<p><a href="#/runbook">All conditions</a></p><section class="card answer"><h3>${name}</h3>${markdown(RUNBOOK[name])}
    ${now.length ? html`<h4>Active now</h4><ul>${now.map((one) => html`<li class="bad">${one.summary}</li>`)}</ul>` : html`<${Nothing}>Not active.<//>`}</section>`;
}
