// A bar for each node: what is taken, promised, kept and lent of its cap.
import { html, useState } from "/ui/vendor/preact.js";
import { Nothing, Wrong, ask, seconds, size, useAction } from "/ui/pool.js";

const PARTS = [["current", "in use"], ["reserved", "promised"], ["margin", "margin"], ["lease", "lent to video"]];

const over = (node) => node.current === null || node.headroom < 0;

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
  const told = PARTS.map(([name, label]) => `${label} ${size(values[name])}`).join(", ");
  return html`<svg class="bar" viewBox="0 0 1000 20" preserveAspectRatio="none" role="meter" aria-valuemin="0"
      aria-valuemax=${cap} aria-valuenow=${values.current} aria-label=${`Memory of ${node.name}`}
      aria-valuetext=${`${told}, of a cap of ${size(node.cap)}`}>
      ${pieces}<rect class="peak" x=${Math.min(share(node.recent), 997)} y="0" width="3" height="20" /></svg>
    <p class="small row"><span>headroom <b class=${over(node) ? "bad" : ""}>${size(node.headroom)}</b></span>
      <span class="quiet">of ${size(node.cap)}, decided by ${node.bound_by || "–"}</span></p>`;
}

const SPANS = [["3600", "1 hour"], ["7200", "2 hours"], ["28800", "8 hours"], ["86400", "a day"], ["", "until it is ended"]];

// Its owner wants the memory back: a pause that ends by itself, or a person's pause that is ended.
function Pause({ node, act, busy }) {
  const [span, setSpan] = useState("7200");
  if (node.sharing.by_hand) return html`<button disabled=${busy} onClick=${() => act("resume")}>End its pause</button>`;
  return html`<span class="row"><label>Pause for <select aria-label=${`How long ${node.name} is paused`} value=${span} onChange=${(event) => setSpan(event.target.value)}>
      ${SPANS.map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select></label>
    <button disabled=${busy} onClick=${() => act("pause", span ? { seconds: Number(span) } : {})}>Give its memory back</button></span>`;
}

function Node({ node }) {
  const [act, { busy, error }] = useAction((verb, body) => ask("POST", `/api/v1/nodes/${node.id}/${verb}`, body));
  const armed = node.gate_armed;
  const loaded = node.models.filter((model) => model.loaded);
  return html`<section class="card" aria-label=${node.name}>
    <div class="row spread"><h3>${node.name}</h3><span class="row">
      <span class=${`badge ${node.state === "ready" ? "good" : "warn"}`}>${node.cordoned ? "cordoned" : node.state}</span>
      <span class=${`badge ${armed ? "good" : "bad"}`}>${armed ? "gate armed" : node.guard ? "gate not armed" : "guard off"}</span></span></div>
    <${Bar} node=${node} />
    <dl class="facts">
      <dt>requests</dt><dd>${node.in_flight} here, ${node.running} running, ${node.waiting} waiting</dd>
      <dt>models</dt><dd>${loaded.length ? loaded.map((model) => model.name).join(", ") : "none loaded"}</dd>
      <dt>gate</dt><dd>${node.engine.counts.checks} checks, ${node.engine.counts.refusals} refusals</dd>
      <dt>machine</dt><dd>${node.chip || "unknown"}, ${size(node.memory)}</dd>
      ${node.state === "paused" ? html`<dt>paused</dt><dd class="warn">${node.sharing.why}${node.sharing.until ? `, until ${new Date(node.sharing.until * 1000).toLocaleString()}` : ""}</dd>` : null}
      ${node.breaker && node.breaker.state !== "closed" ? html`<dt>failing</dt><dd class="bad">gets no requests ${node.breaker.state === "open" ? `until ${new Date(node.breaker.until * 1000).toLocaleTimeString()}` : "but one that is tried"}: ${node.breaker.why}</dd>` : null}
      ${node.heard_seconds ? html`<dt>heard</dt><dd class="warn">${seconds(node.heard_seconds)} ago</dd>` : null}
      ${node.remedy && over(node) ? html`<dt>more room</dt><dd>${node.remedy}</dd>` : null}
    </dl>
    <p class="row"><button disabled=${busy} onClick=${() => act(node.cordoned ? "uncordon" : "cordon")}>${node.cordoned ? "Send requests again" : "Send nothing new"}</button>
      <button disabled=${busy} onClick=${() => act("drain", { wait_seconds: 30 })}>Move its requests away</button>
      ${node.sharing.when ? html`<${Pause} node=${node} act=${act} busy=${busy} />` : null}</p>
    <${Wrong} text=${error} />
  </section>`;
}

export function Pool({ pool }) {
  const { status, nodes = [], conditions = [] } = pool;
  if (!status) return html`<${Nothing}>Asking the coordinator …<//>`;
  const notes = [...conditions.map((one) => [one.severity === "critical" ? "bad" : "warn", `${one.summary} – ${one.remedy}`]), ...status.dangers.map((text) => ["bad", text]), ...status.warnings.map((text) => ["warn", text])];
  return html`
    <p>Requests: ${status.in_flight} under way, ${status.queued} in line. Models: ${status.models.length}.</p>
    ${notes.length ? html`<ul role="status">${notes.map(([kind, text]) => html`<li class=${kind}>${text}</li>`)}</ul>` : html`<p class="good" role="status">Nothing needs you.</p>`}
    <p class="small row">${PARTS.map(([name, label]) => html`<span><span class=${`key ${name}`}></span>${label}</span>`)}<span><span class="key free"></span>free</span><span>│ highest of late</span></p>
    ${nodes.length ? html`<div class="cards">${nodes.map((node) => html`<${Node} key=${node.id} node=${node} />`)}</div>`
      : html`<${Nothing}>No Mac is here yet: <a href="#/join">let one join</a>.<//>`}`;
}
