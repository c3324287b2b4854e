// API keys of programs: limits, expiry, name, secret and usage.
import { html, useEffect, useLayoutEffect, useRef, useState } from "/ui/vendor/preact.js";
import { Copy, Nothing, Table, Wrong, call, useAction, useAsked, when } from "/ui/shared.js";
import { Usage, limitsText } from "/ui/views/usage.js";

const LIVES = [["", "never"], ["604800", "in 7 days"], ["2592000", "in 30 days"], ["7776000", "in 90 days"], ["31536000", "in 1 year"]];
const NUMBERS = [["requests_per_minute", "Requests per minute", 1], ["tokens_per_minute", "Tokens per minute", 1], ["concurrency", "Concurrent requests", 1], ["waiting", "Queued requests", 0]];
const LISTS = [["models", "Models", "all; qwen*, llama-8b"], ["labels", "Mac labels", "all Macs"]];
const SCOPES = [["infer", "infer: use models"], ["metrics", "metrics: read states and metrics"], ["admin", "admin: everything"]];

const fieldsOf = (limits) => ({ ...Object.fromEntries(NUMBERS.map(([name]) => [name, String(limits[name] ?? "")])), ...Object.fromEntries(LISTS.map(([name]) => [name, (limits[name] ?? []).join(", ")])), priority: limits.priority ?? "normal" });

// The limits as the API takes them: an empty field is no limit. Limits of `before` that have no field here are kept.
function limitsOf(fields, before = {}) {
  const found = Object.fromEntries(Object.entries(before).filter(([name]) => !(name in fields)));
  if (fields.priority !== "normal") found.priority = fields.priority;
  for (const [name] of NUMBERS) if (fields[name] !== "") found[name] = Number(fields[name]);
  for (const [name] of LISTS) {
    const values = fields[name].split(",").map((value) => value.trim()).filter(Boolean);
    if (values.length) found[name] = values;
  }
  return found;
}

function Limits({ fields, set }) {
  const put = (name) => (event) => set({ ...fields, [name]: event.target.value });
  return html`<div class="fields">
    ${LISTS.map(([name, label, hint]) => html`<label>${label} <input value=${fields[name]} placeholder=${hint} onInput=${put(name)} /></label>`)}
    ${NUMBERS.map(([name, label, least]) => html`<label>${label} <input type="number" min=${least} step="1" value=${fields[name]} placeholder="no limit" onInput=${put(name)} /></label>`)}
    <label>Priority <select value=${fields.priority} onChange=${put("priority")}>${["low", "normal", "high"].map((value) => html`<option value=${value}>${value}</option>`)}</select></label></div>`;
}

// A new secret. With many keys, its place may be far from the button.
function Secret({ made }) {
  const place = useRef(null);
  useEffect(() => place.current.scrollIntoView({ block: "nearest" }), []);
  return html`<div ref=${place} role="status"><p>The key of <b>${made.name}</b> is shown only once:</p><pre tabindex="0">${made.key}</pre><p class="row"><${Copy} text=${made.key} /></p></div>`;
}

const Secrets = ({ list }) => list.map((made) => html`<${Secret} key=${made.key} made=${made} />`);

// Every secret that was made in this view, until its key gets another one or is revoked: no later action may hide it.
function useSecrets() {
  const [list, setList] = useState([]);
  const drop = (id) => setList((old) => old.filter((one) => one.id !== id));
  const add = (made) => setList((old) => [...old.filter((one) => one.id !== made.id), made]);
  return [list, add, drop];
}

function Create({ reload, secrets, addSecret }) {
  const [name, setName] = useState("");
  const [scope, setScope] = useState("infer");
  const [life, setLife] = useState("");
  const [fields, setFields] = useState(fieldsOf({}));
  const [make, { busy, error }] = useAction(async () => {
    const made = await call("POST", "/api/v1/keys", { name, scopes: [scope], ttl_seconds: life ? Number(life) : null, limits: limitsOf(fields) });
    addSecret({ ...made, name, isNew: true });
    setName("");
    setFields(fieldsOf({}));
    reload();
  });
  return html`<section class="card" aria-label="Create a key"><h3>Create a key</h3>
    <form onSubmit=${(event) => { event.preventDefault(); make(); }}>
      <div class="fields"><label>Name <input required maxlength="100" value=${name} onInput=${(event) => setName(event.target.value)} /></label>
        <label>Scope <select value=${scope} onChange=${(event) => setScope(event.target.value)}>${SCOPES.map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select></label>
        <label>Expires <select value=${life} onChange=${(event) => setLife(event.target.value)}>${LIVES.map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select></label></div>
      <details><summary>Models and limits</summary><${Limits} fields=${fields} set=${setFields} /></details>
      <p><button class="main" disabled=${busy || !name.trim()}>Create</button></p></form>
    <${Secrets} list=${secrets.filter((one) => one.isNew)} /><${Wrong} text=${error} /></section>`;
}

// Form to edit a key. Unchanged fields are not sent.
function Edit({ row, close }) {
  const first = useRef(null);
  useLayoutEffect(() => first.current.focus(), []); // before a person can type into another field
  const [name, setName] = useState(row.name);
  const [life, setLife] = useState(null);
  const [fields, setFields] = useState(fieldsOf(row.limits));
  const path = `/api/v1/keys/${encodeURIComponent(row.id)}`;
  const [save, { busy, error }] = useAction(async () => {
    if (name !== row.name) await call("PUT", `${path}/name`, { name });
    if (life !== null) await call("PUT", `${path}/expiry`, { ttl_seconds: life ? Number(life) : null });
    const before = limitsOf(fieldsOf(row.limits), row.limits), after = limitsOf(fields, row.limits);
    if (JSON.stringify(before) !== JSON.stringify(after)) await call("PUT", `${path}/limits`, { limits: after });
    close();
  });
  return html`<section class="card" aria-label=${`Edit ${row.name}`}><h3>Edit ${row.name}</h3>
    <form onSubmit=${(event) => { event.preventDefault(); save(); }}>
      <div class="fields"><label>New name <input ref=${first} required maxlength="100" value=${name} onInput=${(event) => setName(event.target.value)} /></label>
        <label>New expiry <select value=${life ?? "keep"} onChange=${(event) => setLife(event.target.value)}><option value="keep" disabled>${row.expires ? when(row.expires) : "never (unchanged)"}</option>${LIVES.map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select></label></div>
      <${Limits} fields=${fields} set=${setFields} />
      <p class="row"><button class="main" disabled=${busy || !name.trim()}>Save</button><button type="button" onClick=${close}>Close</button></p></form>
    <${Wrong} text=${error} /></section>`;
}

export function Keys() {
  const [keys, wrong, reload] = useAsked("/api/v1/keys");
  const [edited, setEdited] = useState("");
  const [secrets, addSecret, dropSecret] = useSecrets();
  const [act, { error }] = useAction(async (verb, row) => {
    const path = `/api/v1/keys/${encodeURIComponent(row.id)}`;
    if (verb === "rotate") {
      if (!confirm(`Give ${row.name} a new secret? Programs that use the old one are refused immediately.`)) return;
      addSecret({ ...(await call("POST", `${path}/rotate`).finally(reload)), name: row.name });
    } else {
      if (!confirm(`Revoke ${row.name}? Programs that use this key are refused immediately.`)) return;
      await call("DELETE", path).finally(reload);
      dropSecret(row.id);
    }
  });
  const rows = keys?.keys ?? [];
  const row = rows.find((one) => one.id === edited);
  const state = (one) => one.expires && one.expires * 1000 < Date.now() ? html`<span class="bad">expired ${when(one.expires)}</span>` : when(one.expires);
  return html`<${Create} reload=${reload} secrets=${secrets} addSecret=${addSecret} />
  <section class="card" aria-label="API keys"><h3>Keys</h3><${Wrong} text=${wrong || error} /><${Secrets} list=${secrets.filter((one) => !one.isNew)} />
    ${rows.length ? html`<${Table} caption="Keys" head=${["name", "id", "scopes", "created", "expires", "limits", "actions"]}
      rows=${rows.map((one) => ({ key: one.id, cells: [one.name, html`<code>${one.id}</code>`, one.scopes.join(", "), when(one.created), state(one), limitsText(one.limits),
        html`<span class="row tight"><button onClick=${() => setEdited(one.id)}>Edit</button><button onClick=${() => act("rotate", one)}>Rotate</button><button onClick=${() => act("revoke", one)}>Revoke</button></span>`] }))} />` : html`<${Nothing}>There are no keys.<//>`}</section>
  ${row ? html`<${Edit} key=${row.id} row=${row} close=${() => { setEdited(""); reload(); }} />` : null}
  <${Usage} path="/api/v1/keys/usage" keys=${true} />`;
}
