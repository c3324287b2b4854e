// Requests in flight and ended, with a filter; one of them explained: every decision with every node's arithmetic.
import { html, useEffect, useRef, useState } from "/ui/vendor/preact.js";
import { Nothing, PRESENT, Table, Wrong, clock, count, rate, seconds, size, useAsked } from "/ui/shared.js";

const CANCELLED = ["cancelled", "slow_client"];
// All codes of failures of a node, an upstream or the router; any other code is that of a refusal.
const FAILED = ["answer_too_long", "command_timeout", "engine_crashed", "engine_error", "engine_lost", "failed", "grammar_failed", "link_lost", "memory_pressure", "node_lost", "node_stopping", "router_error", "shutting_down", "upstream_failed"];
const MAX_UNBROKEN = 28;
const KINDS = { "": "all", ok: "ok", refused: "refused", failed: "failed", cancelled: "cancelled" };

const kindOf = (outcome) => outcome === "ok" ? "ok" : CANCELLED.includes(outcome) ? "cancelled" : FAILED.includes(outcome) ? "failed" : "refused";
const colour = (outcome) => ({ ok: "good", cancelled: "quiet" })[kindOf(outcome)] ?? "bad";
const link = (id) => html`<a href=${`#/requests/${encodeURIComponent(id)}`}>${id}</a>`;
// Clients may use an id twice. The times of a request in the loaded list and in the live stream may differ by a millisecond.
const sameAs = (one) => [one.request_id, one.outcome, one.prompt_tokens, one.completion_tokens].join(" ");
const short = (name) => html`<span class=${name.length > MAX_UNBROKEN ? "" : "nowrap"}>${name}</span>`;
const steps = (rows) => !rows.length ? null : html`<${Table} caption="Steps" head=${["#after", "event", "Mac"]} rows=${rows.map((step, at) => ({ key: at, cells: [seconds(step.at), step.what, step.node] }))} />`;

// A request in flight is asked for again when its phase changes, and at its end.
function One({ id, phase }) {
  const [found, error, reload] = useAsked(`/api/v1/requests/${encodeURIComponent(id)}`);
  const seen = useRef(phase);
  useEffect(() => {
    if (seen.current !== phase) reload();
    seen.current = phase;
  }, [phase]);
  const back = html`<p><a href="#/requests">All requests</a></p>`;
  if (!found) return html`${back}<${Wrong} text=${error} />`;
  return html`${back}
    ${found.under_way.map((one) => html`<div class="card"><h3>${one.request_id}</h3><p>${one.model}: ${one.phase}, for ${seconds(one.seconds)}.</p>${steps(one.steps)}</div>`)}
    ${found.requests.map((one) => html`<div class="card"><h3>${one.request_id}</h3>
      <p>${one.model}: <b class=${colour(one.outcome)}>${one.outcome}</b> after ${seconds(one.seconds)}. ${one.message}</p>
      <dl class="facts"><dt>arrived</dt><dd>${clock(one.at)}</dd><dt>key</dt><dd>${one.key_name}</dd><dt>Mac</dt><dd>${one.node || "none"}</dd>
        <dt>time to first token</dt><dd>${seconds(one.ttft_seconds)}</dd><dt>decode</dt><dd>${rate(one.tokens_per_second)} tokens/s</dd>
        <dt>tokens</dt><dd>${count(one.prompt_tokens)} prompt, ${count(one.cached_tokens)} of them cached, ${count(one.completion_tokens)} generated</dd></dl>
      ${steps(one.steps)}</div>`)}
    ${found.decisions.map((one) => html`<div class="card"><h3>Decision ${seconds(one.seconds_ago)} ago, among ${one.nodes} Macs</h3>
      ${one.refused ? html`<p class="bad">${one.refused}</p>` : null}
      <${Table} caption="Macs" head=${["Mac", "#needs", "#headroom", "#first token in", "#answer in", "verdict"]} rows=${one.candidates.map((row) => ({ key: row.node,
        cells: [row.name, ...(row.need && PRESENT.includes(row.state) ? [size(row.need), size(row.headroom), seconds(row.expected_ttft_seconds), seconds(row.expected_answer_seconds)] : ["–", "–", "–", "–"]),
          html`<div class="reason">${row.chosen ? html`<b class="good">chosen</b>` : row.why_not || "fits"}</div>`] }))} /></div>`)}`;
}

function Ended({ ended }) {
  const [text, setText] = useState("");
  const [kind, setKind] = useState("");
  const [all, setAll] = useState(false);
  const [older, error, reload] = useAsked(all ? "/api/v1/requests?last=1000" : "");
  const known = new Set((older?.requests ?? []).map(sameAs));
  // Requests that left the live stream since the last answer are in neither of the two.
  useEffect(() => {
    if (older && ended.length && !known.has(sameAs(ended[0]))) reload();
  }, [ended[0]?.request_id]);
  const rows = [...(older?.requests ?? []).map((one) => ({ ...one, key: one.key_name })), ...ended.filter((one) => !known.has(sameAs(one)))];
  const wanted = text.trim().toLowerCase();
  const fits = (one) => (!kind || kindOf(one.outcome) === kind) && (!wanted || [one.request_id, one.key, one.model, one.node, one.outcome, one.message].some((value) => value.toLowerCase().includes(wanted)));
  const shown = rows.filter(fits).toReversed();
  return html`<section class="card"><h3>Ended</h3>
    <p class="row"><label>Filter <input type="search" value=${text} placeholder="id, key, model, Mac, reason" onInput=${(event) => setText(event.target.value)} /></label>
      <select aria-label="Outcome" value=${kind} onChange=${(event) => setKind(event.target.value)}>${Object.entries(KINDS).map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select>
      <span class="small quiet">${count(shown.length)} of ${count(rows.length)}</span>
      ${all ? null : html`<button onClick=${() => setAll(true)}>Load the newest 1,000</button>`}</p><${Wrong} text=${error} />
    ${shown.length ? html`<${Table} caption="Ended requests" head=${["time", "request", "key", "model", "Mac", "outcome", "#TTFT", "#tok/s", "#took", "#prompt", "#cached", "#generated"]}
      rows=${shown.map((one) => ({ key: one.request_id + one.at, cells: [html`<span class="nowrap">${clock(one.at)}</span>`, link(one.request_id), one.key, short(one.model), one.node || "–", html`<span class=${colour(one.outcome)}>${one.outcome}</span>${one.message ? html`<div class="small reason">${one.message}</div>` : null}`,
        seconds(one.ttft_seconds), rate(one.tokens_per_second), seconds(one.seconds), count(one.prompt_tokens), count(one.cached_tokens), count(one.completion_tokens)] }))} />`
      : html`<${Nothing}>${rows.length ? "No request matches the filter." : "No request has ended yet."}<//>`}</section>`;
}

export function Requests({ pool, rest }) {
  const { requests = [], ended = [] } = pool;
  if (rest[0]) {
    const [id] = rest;
    return html`<${One} key=${id} id=${id} phase=${requests.find((one) => one.id === id)?.phase} />`;
  }
  return html`<section class="card"><h3>In flight</h3>${requests.length ? html`<${Table} caption="Requests in flight" head=${["time", "request", "key", "model", "Mac", "state", "#prompt", "#cached", "#generated", "#attempts"]}
      rows=${requests.map((one) => ({ key: one.id, cells: [html`<span class="nowrap">${clock(one.at)}</span>`, link(one.id), one.key, short(one.model), one.node || "–", one.phase, count(one.prompt_tokens), count(one.cached_tokens), count(one.completion_tokens), one.attempts] }))} />` : html`<${Nothing}>There are no requests in flight.<//>`}</section>
    <${Ended} ended=${ended} />`;
}
