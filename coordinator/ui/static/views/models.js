// Models: their copies on each Mac, wishes, aliases and disks. Administrators pull, load, verify, want and delete them.
import { html, useState } from "/ui/vendor/preact.js";
import { Nothing, PRESENT, Table, Wrong, call, clock, count, size, useAction, useCommands, usePolled } from "/ui/shared.js";
import { NewPull, Pulls } from "/ui/views/pulls.js";

const RELOAD_MS = 5000;
const MAX_REPLICAS = 1000;
const MAX_NOTES = 3;
const STATES = { known: "on disk", failed: "cannot load" };
const PURPOSES = { embed: "for embeddings, ", rerank: "for rerank, " };
const IDENTITIES = { content: "same content", sampled: "same samples" };
const WORKING = { load: "Loading …", unload: "Unloading …", verify: "Reading all files …", remove: "Deleting …" };

// The sentence about a completed command. The coordinator chose the Mac of a command without one.
function describeEnd({ name, model, node, answer }) {
  const mac = (answer.node ?? answer.nodes[0]).name, named = `${model} on ${mac}`;
  if (!node) return `${model} is loaded on ${mac}.`;
  if (name === "verify") return `${named}: all files read, content ${answer.content.slice(0, 12)}.`;
  return { load: `${named} is loaded.`, unload: `${named} is unloaded.`, remove: `${named} is deleted, ${size(answer.freed)} freed.` }[name];
}

// Whether a command of these runs, which one, and why the newest one has failed.
function summarize(commands) {
  const running = commands.find((one) => one.state === "running");
  return { running: running?.name ?? "", failure: !running && commands[0]?.state === "failed" ? commands[0].message : "" };
}

// A Mac that is not here: neither its state of the past nor a button.
const Away = ({ place, commands }) => html`<li>${place.name}: <b class="quiet">${place.state}</b><${Wrong} text=${summarize(commands).failure} /></li>`;

const Facts = ({ place }) => html`<p class="small quiet">${place.stored ? `${size(place.stored)}, ` : ""}${place.quantization ? `${place.quantization}, ` : ""}
  ${place.model === "failed" ? null : place.identity === "differs" ? html`<b class="bad">DIFFERS</b>, ` : `${IDENTITIES[place.identity]}, `}
  ${place.used ? `last request ${clock(place.used)}` : "never used"}</p>`;

function Place({ model, place, own, commands, start }) {
  const [act, { busy, error }] = useAction((verb) => start(verb, { model: model.name, node: place.id }));
  const { running, failure } = summarize(commands);
  const named = `${model.name} on ${place.name}`;
  const remove = () => confirm(`Delete ${named}? Its files of ${size(place.stored)} are removed from the disk.`) && act("remove");
  const button = (label, act) => html`<button class="small" aria-label=${`${label} ${named}`} disabled=${busy || running} onClick=${act}>${label}</button>`;
  const { measured } = place;
  const resting = place.model !== "loaded" && place.model !== "loading";
  return html`<li><div class="row spread"><span>${place.name}: <b>${STATES[place.model] ?? place.model}</b></span>${own.admin ? html`<span class="row tight">
      ${place.model === "loaded" ? button("Unload", () => act("unload")) : null}
      ${resting ? button("Load", () => act("load")) : null}
      ${place.stored ? button("Verify", () => act("verify")) : null}
      ${place.removable && resting ? button("Delete", remove) : null}</span>` : null}</div>
    ${place.cause ? html`<p class="small bad">${place.cause}</p>` : null}
    ${place.model === "loading" || (running === "load" && place.model !== "loaded") ? html`<progress max="1" value=${place.progress} aria-label=${`Loading ${named}`}></progress>` : null}
    <${Facts} place=${place} />
    ${place.model === "loaded" ? html`<p class="small quiet">prefill ${count(Math.round(place.prefill_speed))} tokens/s, decode ${count(Math.round(place.decode_speed))} tokens/s for one request</p>` : null}
    ${measured ? html`<p class="small quiet">measured: up to ${count(measured.max_context)} tokens in one request, ${measured.max_batch} concurrent requests, ${size(measured.kv_per_token)} per token</p>` : null}
    <span class="small quiet" role="status">${WORKING[running] ?? ""}</span><${Wrong} text=${error || failure} /></li>`;
}

function WishState({ wish }) {
  const parts = [`${wish.ready.length} ready${wish.ready.length ? ` (${wish.ready.join(", ")})` : ""}`];
  if (wish.loading.length) parts.push(`loading on ${wish.loading.join(", ")}`);
  if (wish.away.length) parts.push(`${wish.away.join(", ")} away`);
  return html`<p class="small"><span class=${`badge ${wish.met ? "good" : "warn"}`}>${wish.met ? "wish met" : "wish not met"}</span> ${wish.replicas} ${wish.replicas === 1 ? "replica" : "replicas"} wanted,
    ${wish.wanted ? ` ${parts.join(", ")}` : " unloaded until the next request"}${wish.missing ? html`<br /><span class=${wish.met ? "" : "warn"}>${wish.missing}</span>` : null}</p>`;
}

function Actions({ name, wish, loadable, announce, commands, start }) {
  const [edited, setEdited] = useState(null);
  const path = `/api/v1/models/wishes/${name.split("/").map(encodeURIComponent).join("/")}`;
  const [load, loading] = useAction(() => start("load", { model: name }));
  const { running, failure } = summarize(commands);
  const [want, { busy, error }] = useAction(async (replicas) => {
    const { model, ...kept } = wish ? (await call("GET", path)).wish : {};
    await call("PUT", path, { ...kept, replicas });
    announce(`${name}: ${replicas} ${replicas === 1 ? "replica" : "replicas"} wanted.`);
    setEdited(null);
  });
  const [unwant, ending] = useAction(async () => {
    await call("DELETE", path);
    announce(`The wish for ${name} was removed.`);
    setEdited(null);
  });
  const shown = edited ?? wish?.replicas ?? 1;
  return html`<form class="row" onSubmit=${(event) => { event.preventDefault(); want(Number(shown)); }}>
      <label class="small">Replicas <input class="narrow" type="number" required min="1" max=${MAX_REPLICAS} step="1" aria-label=${`Replicas of ${name}`} value=${shown} onInput=${(event) => setEdited(event.target.value)} /></label>
      <button class="small" aria-label=${wish ? `Change the wish for ${name}` : `Want ${name}`} disabled=${busy}>${wish ? "Change" : "Want"}</button>
      ${wish ? html`<button type="button" class="small" aria-label=${`Unwant ${name}`} disabled=${ending.busy} onClick=${unwant}>Unwant</button>` : null}
      ${loadable ? html`<button type="button" class="small" aria-label=${`Load on the best Mac: ${name}`} disabled=${loading.busy || running} onClick=${load}>Load on the best Mac</button>` : null}</form>
    <span class="small quiet" role="status">${WORKING[running] ?? ""}</span><${Wrong} text=${error || ending.error || loading.error || failure} />`;
}

function Model({ name, model, wish, own, announce, commands, start }) {
  const of = (node) => commands.filter((one) => one.model === name && one.node === node);
  const places = model?.nodes.filter((place) => place.state !== "left") ?? [];
  const loadable = places.some((place) => PRESENT.includes(place.state) && place.model === "known");
  return html`<section class="card" aria-label=${name}><h3>${name}</h3>
    <p class="quiet small">${model ? `${PURPOSES[model.kind] ?? ""}${size(model.weights)}, context of ${count(model.context)} tokens` : "No Mac has this model."}</p>
    ${model?.conflict ? html`<p class="warn small">Macs have different models with this name: requests go to only one of them.</p>` : null}
    ${wish ? html`<${WishState} wish=${wish} />` : null}
    ${places.length ? html`<ul class="places">${places.map((place) => PRESENT.includes(place.state) ? html`<${Place} key=${place.id} model=${model} place=${place} own=${own} commands=${of(place.id)} start=${start} />` : html`<${Away} key=${place.id} place=${place} commands=${of(place.id)} />`)}</ul>` : null}
    ${own.admin ? html`<${Actions} name=${name} wish=${wish} loadable=${loadable} announce=${announce} commands=${of(null)} start=${start} />` : null}</section>`;
}

const Aliases = ({ aliases }) => html`<section class="card" aria-label="Aliases"><h3>Aliases</h3>
  <${Table} caption="Aliases of models" head=${["alias", "candidates in order", "first on a Mac"]} rows=${aliases.map((one) => ({ key: one.name,
    cells: [one.name, [...one.candidates, ...(one.upstream ? [`upstream ${one.upstream}`] : [])].join(", then "), one.served ?? html`<span class="warn">none</span>`] }))} /></section>`;

const Disks = ({ nodes }) => html`<section class="card" aria-label="Disks"><h3>Disks</h3>
  <dl class="facts">${nodes.map((node) => html`<dt>${node.name}</dt><dd>${size(node.disk.free)} of ${size(node.disk.total)} free</dd>`)}</dl></section>`;

// Whether a model is for chats, and a Mac could load it.
export const answersChats = (model) => !(model.kind in PURPOSES) && model.nodes.some((place) => place.state !== "left" && place.model !== "failed");

// The models and aliases of the live stream, or, for a key that may not read it, those that it may use.
export function useModels(pool, own) {
  const [asked, error] = usePolled(own.metrics ? "" : "/api/v1/models", () => RELOAD_MS);
  const { models, aliases = [] } = (own.metrics ? pool : asked) ?? {};
  return [models, error, aliases];
}

// Each model of a Mac with its wish, then the wanted models that no Mac has.
function withWishes(models, wishes) {
  const byName = new Map(wishes.map((wish) => [wish.model.toLowerCase(), wish]));
  const rows = models.map((model) => ({ name: model.name, model, wish: byName.get(model.name.toLowerCase()) }));
  const known = new Set(models.map((model) => model.name.toLowerCase()));
  return [...rows, ...wishes.filter((wish) => !known.has(wish.model.toLowerCase())).map((wish) => ({ name: wish.model, wish }))];
}

export function Models({ pool, own }) {
  const [models, error, aliases] = useModels(pool, own);
  const [text, setText] = useState("");
  const [notes, setNotes] = useState([]);
  const announce = (text) => setNotes((old) => [text, ...old.filter((one) => one !== text)].slice(0, MAX_NOTES));
  const [commands, start] = useCommands(pool.commands ?? [], (ended) => announce(describeEnd(ended)));
  if (!models) return html`<${Nothing}>Loading …<//><${Wrong} text=${error} />`;
  const wanted = text.trim().toLowerCase();
  const fits = ({ name }) => name.toLowerCase().includes(wanted);
  const rows = withWishes(models, pool.wishes ?? []), shown = rows.filter(fits), named = aliases.filter(fits);
  const disks = (pool.nodes ?? []).filter((node) => PRESENT.includes(node.state) && node.disk.total);
  return html`<p class="good says" role="status">${notes.join("\n")}</p><${Wrong} text=${error} />
    ${own.admin ? html`<${NewPull} announce=${announce} />` : null}
    <${Pulls} pulls=${pool.pulls ?? []} own=${own} announce=${announce} />
    ${rows.length || aliases.length ? html`<p class="row"><label>Search <input type="search" value=${text} placeholder="model or alias" onInput=${(event) => setText(event.target.value)} /></label>
      <span class="small quiet" role="status">${count(shown.length)} of ${count(rows.length)} models</span></p>`
      : html`<${Nothing}>There are no models: ${own.admin ? "pull one, or " : ""}put one into a folder listed in <code>models.folders</code>, or into the Hugging Face cache of a Mac.<//>`}
    <div class="cards">${shown.map((row) => html`<${Model} key=${row.name} ...${row} own=${own} announce=${announce} commands=${commands} start=${start} />`)}
      ${named.length ? html`<${Aliases} aliases=${named} />` : null}${disks.length ? html`<${Disks} nodes=${disks} />` : null}</div>`;
}
