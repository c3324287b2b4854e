// What is under way and what has ended; one of them explained: every decision with every node's arithmetic.
import { html } from "/ui/vendor/preact.js";
import { Nothing, Table, Wrong, count, seconds, size, useAsked } from "/ui/pool.js";

function One({ id }) {
  const [told, error] = useAsked(`/api/v1/requests/${encodeURIComponent(id)}`);
  if (!told) return html`<${Wrong} text=${error} />`;
  return html`<p><a href="#/requests">All requests</a></p>
    ${told.under_way.map((one) => html`<div class="card"><h3>${one.request_id}</h3><p>${one.model}: ${one.phase}, for ${seconds(one.seconds)}.</p>
      <${Table} caption="Steps" head=${["#after", "what", "node"]} rows=${one.steps.map((step, at) => ({ key: at, cells: [seconds(step.at), step.what, step.node] }))} /></div>`)}
    ${told.requests.map((story) => html`<div class="card"><h3>${story.request_id}</h3>
      <p>${story.model}: <b class=${story.outcome === "ok" ? "good" : "bad"}>${story.outcome}</b> after ${seconds(story.seconds)}; ${count(story.prompt_tokens)} tokens read, ${count(story.cached_tokens)} of them known, ${count(story.completion_tokens)} written. ${story.message}</p>
      <${Table} caption="Steps" head=${["#after", "what", "node"]} rows=${story.steps.map((step, at) => ({ key: at, cells: [seconds(step.at), step.what, step.node] }))} /></div>`)}
    ${told.decisions.map((one) => html`<div class="card"><h3>Decision ${seconds(one.seconds_ago)} ago, among ${one.nodes} nodes</h3>
      ${one.refused ? html`<p class="bad">${one.refused}</p>` : null}
      <${Table} caption="Nodes" head=${["node", "#needs", "#headroom", "#first token in", "verdict"]} rows=${one.candidates.map((row) => ({ key: row.node,
        cells: [row.name, row.need ? size(row.need) : "–", row.need ? size(row.headroom) : "–", seconds(row.expected_ttft), row.chosen ? html`<b class="good">chosen</b>` : row.why_not || "fits"] }))} /></div>`)}`;
}

export function Requests({ pool, rest }) {
  if (rest[0]) return html`<${One} id=${decodeURIComponent(rest[0])} />`;
  const { requests = [], ended = [] } = pool;
  const link = (id) => html`<a href=${`#/requests/${encodeURIComponent(id)}`}>${id}</a>`;
  return html`<section class="card"><h3>Under way</h3>${requests.length ? html`<${Table} caption="Requests under way" head=${["request", "key", "model", "node", "phase", "#read", "#written", "#attempts"]}
      rows=${requests.map((one) => ({ key: one.id, cells: [link(one.id), one.key, one.model, one.node || "in line", one.phase, count(one.prompt_tokens), count(one.completion_tokens), one.attempts] }))} />` : html`<${Nothing}>Nobody asks anything now.<//>`}</section>
    <section class="card"><h3>Ended</h3>${ended.length ? html`<${Table} caption="Requests that ended" head=${["request", "key", "model", "end", "#took", "#read", "#written", "why"]}
      rows=${ended.toReversed().map((one, at) => ({ key: one.request_id + at, cells: [link(one.request_id), one.key, one.model, html`<span class=${one.outcome === "ok" ? "good" : "bad"}>${one.outcome}</span>`, seconds(one.seconds), count(one.prompt_tokens), count(one.completion_tokens), one.message] }))} />` : html`<${Nothing}>Nothing has ended since the coordinator started.<//>`}</section>`;
}
