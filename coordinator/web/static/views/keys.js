// The keys with which programs use the pool, and what each of them used.
import { html, useState } from "/ui/vendor/preact.js";
import { Nothing, Table, Wrong, call, count, useAction, useAsked, when } from "/ui/pool.js";

export function Keys() {
  const [keys, wrong, reload] = useAsked("/api/v1/keys");
  const [usage] = useAsked("/api/v1/keys/usage");
  const [name, setName] = useState("");
  const [scope, setScope] = useState("infer");
  const [make, { busy, error, done }] = useAction(async () => {
    const made = await call("POST", "/api/v1/keys", { name, scopes: [scope] });
    setName("");
    reload();
    return made;
  });
  const [revoke] = useAction(async (id) => { if (!confirm(`Revoke the key ${id}? Whoever uses it is refused at once.`)) return; await call("DELETE", `/api/v1/keys/${encodeURIComponent(id)}`); reload(); });
  const limited = (limits) => Object.entries(limits).filter(([, value]) => value && value.length !== 0).map(([what, value]) => `${what} ${Array.isArray(value) ? value.join(", ") : value}`).join("; ");
  return html`<section class="card"><h3>A new key</h3>
    <form class="row" onSubmit=${(event) => { event.preventDefault(); make(); }}>
      <label>Name <input required maxlength="100" value=${name} onInput=${(event) => setName(event.target.value)} /></label>
      <label>It may <select value=${scope} onChange=${(event) => setScope(event.target.value)}>
        <option value="infer">ask models</option><option value="metrics">read states and metrics</option><option value="admin">do everything</option></select></label>
      <button class="main" disabled=${busy || !name.trim()}>Make it</button></form>
    ${done ? html`<p>It is shown only now:</p><pre tabindex="0">${done.key}</pre>` : null}<${Wrong} text=${error || wrong} /></section>
  <section class="card"><h3>Keys</h3>${keys?.keys.length ? html`<${Table} caption="Keys" head=${["key", "name", "may", "made", "expires", "limits", "end it"]}
    rows=${keys.keys.map((one) => ({ key: one.id, cells: [one.id, one.name, one.scopes.join(", "), when(one.created), when(one.expires), limited(one.limits), html`<button onClick=${() => revoke(one.id)}>Revoke</button>`] }))} />` : html`<${Nothing}>There are none.<//>`}</section>
  <section class="card"><h3>Usage</h3>${usage?.usage.length ? html`<${Table} caption="Usage" head=${["key", "model", "#requests", "#failed", "#read", "#known before", "#written"]}
    rows=${usage.usage.map((one) => ({ key: one.key + one.model, cells: [one.name || one.key, one.model, count(one.requests), count(one.failed), count(one.prompt_tokens), count(one.cached_tokens), count(one.completion_tokens)] }))} />` : html`<${Nothing}>Nothing was used yet.<//>`}</section>`;
}
