// Models per Mac and their memory. Administrators load and unload models here.
import { html, useEffect } from "/ui/vendor/preact.js";
import { Nothing, PRESENT, Wrong, call, count, size, useAction, useAsked } from "/ui/pool.js";

const RELOAD_MS = 5000;

// A Mac that is not here: neither its state of the past nor a button.
const Away = ({ place }) => html`<li>${place.name}: <b class="quiet">${place.state}</b></li>`;

function Place({ model, place, own }) {
  const [act, { busy, error }] = useAction((verb) => call("POST", `/api/v1/models/${verb}`, { model: model.name, node: place.id }));
  const { measured } = place;
  const button = place.model === "loaded" ? html`<button disabled=${busy} onClick=${() => act("unload")}>Unload</button>`
    : place.model === "loading" ? null : html`<button disabled=${busy} onClick=${() => act("load")}>Load</button>`;
  return html`<li><div class="row spread"><span>${place.name}: <b>${place.model === "known" ? "on disk" : place.model}</b>${place.cause ? html` <span class="bad">${place.cause}</span>` : null}</span>${own.admin ? button : null}</div>
    ${place.model === "loading" || (busy && place.model !== "loaded") ? html`<progress max="1" value=${place.progress} aria-label=${`Loading ${model.name} on ${place.name}`}></progress>` : null}
    ${place.model === "loaded" ? html`<p class="small quiet">prefill ${count(Math.round(place.prefill_speed))} tokens/s, decode ${count(Math.round(place.decode_speed))} tokens/s for one request</p>` : null}
    ${measured ? html`<p class="small quiet">measured: up to ${count(measured.max_context)} tokens in one request, ${measured.max_batch} requests at once, ${size(measured.kv_per_token)} a token</p>` : null}
    <${Wrong} text=${error} /></li>`;
}

// The models of the live stream, or, for a key that may not read it, those that it may use.
export function useModels(pool, own) {
  const [asked, error, reload] = useAsked(own.metrics ? "" : "/api/v1/models");
  useEffect(() => {
    if (own.metrics) return;
    const timer = setInterval(reload, RELOAD_MS);
    return () => clearInterval(timer);
  }, [own.metrics]);
  return [own.metrics ? pool.models : asked?.models, error];
}

export function Models({ pool, own }) {
  const [models, error] = useModels(pool, own);
  if (!models) return html`<${Nothing}>Asking the coordinator …<//><${Wrong} text=${error} />`;
  if (!models.length) return html`<${Nothing}>No model: put one into a folder named by <code>models.folders</code>, or into the Hugging Face cache of a Mac.<//>`;
  return html`<div class="cards">${models.map((model) => html`<section key=${model.name} class="card" aria-label=${model.name}><h3>${model.name}</h3>
    <p class="quiet small">${size(model.weights)}, context of ${count(model.context)} tokens</p>
    ${model.conflict ? html`<p class="warn small">Macs hold different models under this name: requests go to one of them only.</p>` : null}
    <ul>${model.nodes.filter((place) => place.state !== "left").map((place) => PRESENT.includes(place.state) ? html`<${Place} key=${place.id} model=${model} place=${place} own=${own} />` : html`<${Away} key=${place.id} place=${place} />`)}</ul></section>`)}</div>`;
}
