// Which model is where, what it takes, and the buttons to load and unload it.
import { html } from "/ui/vendor/preact.js";
import { Nothing, Wrong, call, count, size, useAction } from "/ui/pool.js";

function Place({ model, place }) {
  const [act, { busy, error }] = useAction((verb) => call("POST", `/api/v1/models/${verb}`, { model: model.name, node: place.id }));
  const { measured } = place;
  return html`<li><div class="row spread"><span>${place.name}: <b>${place.model}</b>${place.cause ? html` <span class="bad">${place.cause}</span>` : null}</span>
    ${place.model === "loaded" ? html`<button disabled=${busy} onClick=${() => act("unload")}>Unload</button>` : place.model === "loading" ? null
      : html`<button disabled=${busy} onClick=${() => act("load")}>Load</button>`}</div>
    ${place.model === "loading" || (busy && place.model !== "loaded") ? html`<progress max="1" value=${place.progress} aria-label=${`Loading ${model.name} on ${place.name}`}></progress>` : null}
    ${place.model === "loaded" ? html`<p class="small quiet">reads ${count(Math.round(place.prefill_speed))} tokens a second, writes ${count(Math.round(place.decode_speed))} to one reader</p>` : null}
    ${measured ? html`<p class="small quiet">measured: up to ${count(measured.max_context)} tokens in one chat, ${measured.max_batch} chats at once, ${size(measured.kv_per_token)} for a token</p>` : null}
    <${Wrong} text=${error} /></li>`;
}

export function Models({ pool }) {
  const { models } = pool;
  if (!models) return html`<${Nothing}>Asking the coordinator …<//>`;
  if (!models.length) return html`<${Nothing}>No Mac has a model: put one into a folder named by <code>models.folders</code>, or into the Hugging Face cache.<//>`;
  return html`<div class="cards">${models.map((model) => html`<section key=${model.name} class="card" aria-label=${model.name}><h3>${model.name}</h3>
    <p class="quiet small">${size(model.weights)}, up to ${count(model.context)} tokens</p>
    <ul>${model.nodes.map((place) => html`<${Place} key=${place.id} model=${model} place=${place} />`)}</ul></section>`)}</div>`;
}
