// A Mac joins: by a command with a token that is good for 15 minutes, or by a code that both screens show.
import { html, useState } from "/ui/vendor/preact.js";
import { Copy, Nothing, Table, Wrong, call, useAction, useAsked, when } from "/ui/shared.js";

function Code({ rows }) {
  const edge = rows.length;
  return html`<svg class="qr" viewBox=${`-4 -4 ${edge + 8} ${edge + 8}`} role="img" aria-label="The same command as a QR code" shape-rendering="crispEdges">
    ${rows.flatMap((row, y) => [...row].map((dark, x) => dark === "1" ? html`<rect x=${x} y=${y} width="1" height="1" />` : null))}</svg>`;
}

// A request that says it is a member's machine: approving it ends that member's certificate.
const Replaces = ({ name }) => name ? html`<p class="warn small">Replaces the member <b>${name}</b>: approving the request ends the current certificate of ${name}. Approve it only if ${name} was set up again.</p>` : null;

function Approve({ waiting }) {
  const [code, setCode] = useState("");
  const [decide, { busy, error, done }] = useAction((method) => call(method, `/api/v1/joins/${encodeURIComponent(code.trim())}`));
  return html`<section class="card"><h3>Join requests</h3>
    ${waiting.length ? html`<ul>${waiting.map((one) => html`<li>${one.name} <span class="quiet">${one.chip}, ${one.address}</span><${Replaces} name=${one.replaces} /></li>`)}</ul>` : html`<${Nothing}>There are no join requests. On the new Mac, run <code>cluster join</code>.<//>`}
    <form class="row" onSubmit=${(event) => { event.preventDefault(); decide("POST"); }}>
      <label>Code on its screen <input inputmode="numeric" autocomplete="off" size="8" value=${code} onInput=${(event) => setCode(event.target.value)} /></label>
      <button class="main" disabled=${busy || !code.trim()}>Approve</button>
      <button type="button" disabled=${busy || !code.trim()} onClick=${() => decide("DELETE")}>Reject</button></form>
    ${done ? html`<p class="good" role="status">${done.name}: ${done.decision}</p>` : null}<${Wrong} text=${error} /></section>`;
}

export function Join({ pool }) {
  const [tokens, refused, reload] = useAsked("/api/v1/tokens");
  const [make, { busy, error, done }] = useAction(async () => {
    const made = await call("POST", "/api/v1/tokens", { ttl_seconds: 900, uses: 1, name: "page" });
    reload();
    return made;
  });
  const [revoke, revoking] = useAction(async (id) => {
    if (!confirm(`Revoke the token ${id}? A Mac that uses this token is refused immediately.`)) return;
    await call("DELETE", `/api/v1/tokens/${encodeURIComponent(id)}`).finally(reload);
  });
  return html`<section class="card"><h3>Join command</h3>
    <p>Run this command on the new Mac. It is valid for one Mac and 15 minutes, and is shown only once.</p>
    <button class="main" disabled=${busy} onClick=${make}>Create a join command</button>
    ${done ? html`<pre tabindex="0">${done.join}</pre><p class="row"><${Copy} text=${done.join} /></p><${Code} rows=${done.qr} />` : null}
    <${Wrong} text=${error || refused} /></section>
    <${Approve} waiting=${pool.joins ?? []} />
    <section class="card"><h3>Join tokens</h3><${Wrong} text=${revoking.error} />${tokens?.tokens.length ? html`<${Table} caption="Join tokens" head=${["token", "note", "#uses left", "expires", "actions"]}
      rows=${tokens.tokens.map((one) => ({ key: one.id, cells: [one.id, one.name, one.uses_left, when(one.expires), html`<button onClick=${() => revoke(one.id)}>Revoke</button>`] }))} />` : html`<${Nothing}>There are no join tokens.<//>`}</section>`;
}
