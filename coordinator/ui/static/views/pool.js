// Health of the pool, its load now and in the last hour, and a memory bar for each present Mac.
import { html, useState } from "/ui/vendor/preact.js";
import { Chart } from "/ui/chart.js";
import { Nothing, PRESENT, Table, Wrong, ask, count, rate, seconds, size, useAction, useHistory } from "/ui/shared.js";

const PARTS = [["current", "in use"], ["reserved", "reserved"], ["margin", "margin"], ["lease", "leased to video"]];
const LIMITS = { static: "system reserve", dynamic: "other apps", metal: "Metal", setting: "memory.cap", container: "the container", leases: "video leases", unreadable: "an unreadable footprint" };
const BADGES = { ready: "good", suspect: "warn", lost: "bad" };
// Macs whose charts are open from the beginning.
const MAX_OPEN = 6;

const isOver = (node) => node.current === null || node.headroom < 0;
const isFailing = (node) => node.breaker && node.breaker.state !== "closed";
const moment = (unix) => new Date(unix * 1000).toLocaleString();

// Problems that need a person, as [class, text, entry of the runbook]. A Mac that was paused, cordoned or put to sleep does not.
export function problems(status, nodes, conditions) {
  const found = conditions.map((one) => [one.severity === "critical" ? "bad" : "warn", `${one.summary} – ${one.remedy}`, one.name]);
  found.push(...status.dangers.map((text) => ["bad", text]));
  found.push(...status.warnings.filter((text) => !status.dangers.includes(text)).map((text) => ["warn", text]));
  const named = (node, name) => conditions.some((one) => one.name === name && one.node === node.name);
  for (const node of nodes) {
    if (node.state === "lost" && !named(node, "NodeDown")) found.push(["bad", `${node.name} is lost: check its power and network`]);
    if (node.state === "suspect") found.push(["warn", `${node.name} has been silent for ${seconds(node.heard_seconds ?? 0)}: it gets no new requests`]);
    if (PRESENT.includes(node.state) && isFailing(node) && !named(node, "BreakerOpen")) found.push(["warn", `${node.name} gets no requests: ${node.breaker.why}`]);
  }
  if (nodes.length && !nodes.some((node) => node.state === "ready" && !node.cordoned)) found.unshift(["bad", "No Mac is ready: requests wait or are refused"]);
  return found;
}

function Health({ status, nodes, conditions }) {
  const found = problems(status, nodes, conditions);
  const ready = nodes.filter((node) => node.state === "ready").length;
  const others = ["joining", "paused", "asleep", "draining", "suspect", "lost"].map((state) => [state, nodes.filter((node) => node.state === state).length]).filter(([, many]) => many);
  const cordoned = nodes.filter((node) => node.cordoned && node.state === "ready").length;
  const summary = [`${ready} of ${nodes.length} Macs ready`, ...others.map(([state, many]) => `${many} ${state}`), ...(cordoned ? [`${cordoned} cordoned`] : [])].join(", ");
  if (!nodes.length) return null;
  return html`<div role="status">${found.length ? html`<ul class="notes">${found.map(([kind, text, entry]) => html`<li class=${kind}>${text}${entry ? html` <a href=${`#/runbook/${entry}`}>Runbook: ${entry}</a>` : null}</li>`)}</ul>` : html`<p class="good"><b>All healthy</b></p>`}
    <p>${summary}. Requests: ${count(status.in_flight)} in flight, ${count(status.queued)} queued. Models: ${count(status.models.length)}.</p></div>`;
}

// The charts of the pool, or of one Mac.
function Charts({ load, at, interval, node }) {
  const chart = (title, shown, series, top) => html`<${Chart} title=${title} at=${at} interval=${interval} shown=${shown} top=${top}
    series=${series.map(([name, kind, values]) => ({ name, kind, values: load[values] }))} />`;
  const tokens = [["generated", "current", "generated_tokens_per_second"], ["prompt", "reserved", "prompt_tokens_per_second"]];
  const requests = [["in flight", "current", "in_flight"], ["queued", "margin", "queued"]];
  return html`<div class="charts">
    ${chart("Tokens per second", rate, node ? tokens.slice(0, 1) : tokens)}
    ${chart(node ? "Requests in flight" : "Requests", count, node ? requests.slice(0, 1) : requests)}
    ${chart("Memory", size, [["in use", "current", "memory_bytes"]], load.cap_bytes.at(-1) ?? 0)}
    ${chart("Time to first token", seconds, [["TTFT", "current", "ttft_seconds"]])}</div>`;
}

function Bar({ node }) {
  const cap = Math.max(node.cap, 1);
  const values = { current: node.current ?? 0, reserved: node.reserved, margin: node.margin, lease: node.leases };
  let from = 0;
  const share = (bytes) => Math.max(0, Math.min(1000, (bytes / cap) * 1000));
  const pieces = PARTS.map(([name]) => {
    const width = Math.min(share(values[name]), 1000 - from);
    const piece = html`<rect class=${name} x=${from} y="0" width=${width} height="20" />`;
    from += width;
    return piece;
  });
  const parts = PARTS.map(([name, label]) => `${label} ${size(values[name])}`).join(", ");
  return html`<svg class="bar" viewBox="0 0 1000 20" preserveAspectRatio="none" role="meter" aria-valuemin="0"
      aria-valuemax=${cap} aria-valuenow=${values.current} aria-label=${`Memory of ${node.name}`}
      aria-valuetext=${`${parts}, of a cap of ${size(node.cap)}`}>
      ${pieces}<rect class="peak" x=${Math.min(share(node.recent), 997)} y="0" width="3" height="20" /></svg>
    <p class="small row"><span>headroom <b class=${isOver(node) ? "bad" : ""}>${size(node.headroom)}</b></span>
      <span class="quiet">of ${size(node.cap)}, limited by: ${LIMITS[node.bound_by] ?? (node.bound_by || "–")}</span></p>`;
}

const SPANS = [["3600", "1 hour"], ["7200", "2 hours"], ["28800", "8 hours"], ["86400", "1 day"], ["", "until resumed"]];

function Pause({ node, act, busy }) {
  const [span, setSpan] = useState("7200");
  if (node.sharing.by_hand) return html`<button disabled=${busy} onClick=${() => act("resume")}>Resume</button>`;
  return html`<span class="row"><select aria-label=${`How long ${node.name} is paused`} value=${span} onChange=${(event) => setSpan(event.target.value)}>
      ${SPANS.map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select>
    <button disabled=${busy} title="Move the requests of this Mac to other Macs, and free its memory for its owner" onClick=${() => act("pause", span ? { seconds: Number(span) } : {})}>Pause</button></span>`;
}

function videoOf({ video }) {
  if (!video.allowed) return "not allowed";
  const cause = video.cause || video.ray_cause;
  return video.ready ? "allowed, ready" : `allowed, not ready${cause ? `: ${cause}` : ""}`;
}

function Actions({ node }) {
  const send = (verb, body) => ask("POST", `/api/v1/nodes/${node.id}/${verb}`, body);
  const [act, { busy, error }] = useAction(send);
  // A slow answer to it blocks no other button.
  const [drain, draining] = useAction(() => send("drain", {}));
  const [remove, removing] = useAction(async () => {
    if (confirm(`Remove ${node.name} from the pool? Its certificate is revoked immediately. To return, the Mac must join again.`)) await ask("DELETE", `/api/v1/nodes/${node.id}`);
  });
  const here = PRESENT.includes(node.state);
  return html`<p class="row">
    ${here ? html`<button disabled=${busy} title="Send no new requests to this Mac" onClick=${() => act(node.cordoned ? "uncordon" : "cordon")}>${node.cordoned ? "Uncordon" : "Cordon"}</button>
      <button disabled=${draining.busy} title="Cordon this Mac and move its requests to other Macs" onClick=${drain}>Drain</button>` : null}
    ${(here || node.state === "paused") && node.sharing.when ? html`<${Pause} node=${node} act=${act} busy=${busy} />` : null}
    <button disabled=${busy} onClick=${() => act(node.video.allowed ? "deny-video" : "allow-video")}>${node.video.allowed ? "Deny video" : "Allow video"}</button>
    ${["lost", "asleep"].includes(node.state) ? html`<button disabled=${removing.busy} onClick=${remove}>Remove</button>` : null}</p>
    <${Wrong} text=${error || draining.error || removing.error} />`;
}

// Card of an absent Mac: state and time, no outdated numbers.
function Away({ node }) {
  const ago = node.heard_seconds === null ? "" : `, last report ${seconds(node.heard_seconds)} ago`;
  if (node.state === "paused") return html`<p class="sentence">${node.sharing.why || "paused"}${node.sharing.until ? `, until ${moment(node.sharing.until)}` : ""}. Its memory is free for its owner.</p>`;
  if (node.state === "joining") return html`<p>Joining: the Mac gets requests after its first reports.</p>`;
  return html`<p class=${node.state === "lost" ? "bad" : ""}>${node.state === "lost" ? "Lost" : node.state === "asleep" ? "Asleep" : node.state}${ago}.${node.state === "lost" ? " Check its power and network." : ""}</p>`;
}

// Cached prompts by model, in memory and on the disk.
function Cache({ cache }) {
  if (!cache.models.length) return null;
  const disk = cache.store ? `, ${size(cache.disk_bytes)} of ${size(cache.disk_quota)} on the disk` : "";
  return html`<details><summary class="small">Cached prompts: ${size(cache.nbytes)} in memory${disk}</summary>
    <${Table} caption="Cached prompts" head=${["model", "#memory", "#prompts", "#hits", "#disk", "#files", "#disk hits"]}
      rows=${cache.models.map((one) => ({ key: one.model, cells: [one.model, size(one.nbytes), count(one.entries), count(one.hits), size(one.disk_bytes), count(one.disk_files), count(one.disk_hits)] }))} /></details>`;
}

function Present({ node }) {
  const loaded = node.models.filter((model) => model.loaded);
  return html`<${Bar} node=${node} />
    <dl class="facts">
      <dt>requests</dt><dd>${node.in_flight} in flight, ${node.running} running, ${node.waiting} waiting</dd>
      <dt>models</dt><dd>${loaded.length ? loaded.map((model) => model.name).join(", ") : "none loaded"}</dd>
      <dt>gate</dt><dd>${count(node.engine.counts.checks)} checks, ${count(node.engine.counts.refusals)} refusals</dd>
      ${isFailing(node) ? html`<dt>failing</dt><dd class="bad">gets no requests ${node.breaker.state === "open" ? `until ${new Date(node.breaker.until * 1000).toLocaleTimeString()}` : "except one trial request"}: ${node.breaker.why}</dd>` : null}
      ${node.heard_seconds ? html`<dt>last report</dt><dd class="warn">${seconds(node.heard_seconds)} ago</dd>` : null}
      ${node.remedy && isOver(node) ? html`<dt>more room</dt><dd>${node.remedy}</dd>` : null}
    </dl>
    <${Cache} cache=${node.engine.cache} />`;
}

function Node({ node, own, history, open }) {
  const here = PRESENT.includes(node.state);
  const armed = node.gate_armed;
  const past = history?.nodes[node.id]?.memory_bytes.some((value) => value !== null) ? history.nodes[node.id] : null;
  return html`<section class="card" aria-label=${node.name}>
    <div class="row spread"><h3>${node.name}</h3><span class="row">
      <span class=${`badge ${node.cordoned ? "quiet" : BADGES[node.state] ?? "quiet"}`}>${node.state}${node.cordoned ? ", cordoned" : ""}</span>
      ${here ? html`<span class=${`badge ${armed ? "good" : "bad"}`}>${armed ? "gate armed" : node.guard ? "gate not armed" : "guard off"}</span>` : null}</span></div>
    ${here ? html`<${Present} node=${node} />` : html`<${Away} node=${node} />`}
    <dl class="facts"><dt>machine</dt><dd>${node.chip || "unknown"}, ${size(node.memory)}${node.version ? `, version ${node.version}` : ""}</dd>
      <dt>video</dt><dd>${videoOf(node)}</dd></dl>
    ${past ? html`<details open=${open}><summary class="small">Last hour</summary><${Charts} load=${past} at=${history.at} interval=${history.interval_seconds} node=${true} /></details>` : null}
    ${own.admin ? html`<${Actions} node=${node} />` : null}
  </section>`;
}

export function Pool({ pool, own }) {
  const { status, conditions = [] } = pool;
  const nodes = (pool.nodes ?? []).filter((node) => node.state !== "left");
  const history = useHistory(pool.load);
  if (!status) return html`<${Nothing}>Loading …<//>`;
  return html`
    <${Health} status=${status} nodes=${nodes} conditions=${conditions} />
    ${history && nodes.length ? html`<section class="card" aria-label="The pool in the last hour"><${Charts} load=${history.pool} at=${history.at} interval=${history.interval_seconds} /></section>` : null}
    <p class="small row">${PARTS.map(([name, label]) => html`<span><span class=${`key ${name}`}></span>${label}</span>`)}<span><span class="key free"></span>free</span><span>│ recent peak</span></p>
    ${nodes.length ? html`<div class="cards">${nodes.map((node) => html`<${Node} key=${node.id} node=${node} own=${own} history=${history} open=${nodes.length <= MAX_OPEN} />`)}</div>`
      : html`<${Nothing}>No Mac has joined yet${own.admin ? html`: <a href="#/join">add one</a>` : null}.<//>`}`;
}
