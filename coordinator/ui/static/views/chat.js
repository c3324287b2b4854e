// A chat: model, system prompt and parameters; which Mac answers, how soon, how fast. It is kept in this tab only.
import { html, useMemo, useState } from "/ui/vendor/preact.js";
import { begin, drop, pick, send, set, stop, useChats } from "/ui/chats.js";
import { markdown } from "/ui/markdown.js";
import { Copy, Nothing, Wrong, count, rate, seconds } from "/ui/shared.js";
import { answersChats, useModels } from "/ui/views/models.js";

const MAX_TITLE = 40;
// A decode time below which tokens per second say nothing.
const MIN_DECODE_SECONDS = 0.05;
const PARAMETERS = [["temperature", "Temperature", 0, 2, 0.1], ["top_p", "Top p", 0, 1, 0.05], ["max_tokens", "Max tokens", 1, 1000000, 1]];

function Answer({ text }) {
  return html`<div class="answer">${useMemo(() => markdown(text), [text])}</div>`;
}

function About({ turn }) {
  const decoding = turn.took - turn.first;
  const speed = turn.tokens > 1 && decoding >= MIN_DECODE_SECONDS ? (turn.tokens - 1) / decoding : 0;
  const facts = [turn.model, turn.node ? `on ${turn.node}` : "", turn.first === undefined ? "" : `first token after ${seconds(turn.first)}`, turn.tokens ? `${count(turn.tokens)} tokens` : "",
    speed ? `${rate(speed)} tokens/s` : "", turn.ended === "length" ? "ended at max tokens" : turn.ended === "stopped" ? "stopped" : ""];
  return html`<span class="small quiet">${facts.filter(Boolean).join(", ")}</span>`;
}

function Turn({ turn }) {
  if (turn.role === "user") return html`<div class="turn user"><div class="says">${turn.text}</div></div>`;
  return html`<div class="turn assistant">
    ${turn.thought ? html`<details open=${!turn.text}><summary>Reasoning</summary><div class="says quiet">${turn.thought}</div></details>` : null}
    <${Answer} text=${turn.text} /><p class="row spread"><${About} turn=${turn} /><${Copy} text=${turn.text} /></p></div>`;
}

function Parameters({ chat }) {
  return html`<details><summary>System prompt and parameters</summary>
    <label for="system">System prompt</label><textarea id="system" value=${chat.system} onInput=${(event) => set(chat.id, { system: event.target.value })}></textarea>
    <div class="fields">${PARAMETERS.map(([name, label, min, max, step]) => html`<label>${label} <input type="number" min=${min} max=${max} step=${step} placeholder="default"
      value=${chat[name]} onInput=${(event) => set(chat.id, { [name]: event.target.value })} /></label>`)}</div></details>`;
}

const titleOf = (chat) => chat.turns[0]?.text.slice(0, MAX_TITLE) || "New chat";

export function Chat({ pool, own }) {
  const [models, wrong] = useModels(pool, own);
  const { chats, chat, busy } = useChats();
  const [text, setText] = useState("");
  const names = (models ?? []).filter(answersChats).map((one) => one.name);
  const model = names.includes(chat.model) ? chat.model : names[0] ?? "";
  const submit = (event) => {
    event.preventDefault();
    if (!text.trim() || busy || !model) return;
    setText("");
    send(chat, model, text);
  };
  if (!names.length) return html`<${Wrong} text=${wrong} /><${Nothing}>${models ? "No chat model is available yet." : "Loading …"}<//>`;
  return html`<section class="card">
    <div class="row"><label>Model <select value=${model} onChange=${(event) => set(chat.id, { model: event.target.value })}>${names.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      ${chats.length > 1 ? html`<label>History <select value=${chat.id} onChange=${(event) => pick(event.target.value)}>${chats.map((one) => html`<option value=${one.id}>${titleOf(one)}</option>`)}</select></label>` : null}
      ${chat.turns.length ? html`<button type="button" disabled=${busy === chat.id} onClick=${() => begin(chat)}>New chat</button><button type="button" disabled=${busy === chat.id} onClick=${() => drop(chat.id)}>Delete</button>` : null}</div>
    <${Parameters} chat=${chat} />
    <div aria-live="polite" aria-busy=${busy === chat.id}>${chat.turns.map((turn, at) => html`<${Turn} key=${at} turn=${turn} />`)}
      ${busy === chat.id && chat.turns.at(-1).role === "user" ? html`<p class="quiet">Waiting for the first token …</p>` : null}</div>
    <${Wrong} text=${chat.error} />
    <form onSubmit=${submit}><label for="said">Your message</label>
      <textarea id="said" value=${text} onInput=${(event) => setText(event.target.value)}
        onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event); }}></textarea>
      <p class="row"><button class="main" disabled=${busy || !text.trim()}>Send</button>
        ${busy ? html`<button type="button" onClick=${stop}>Stop</button>` : null}
        <span class="small quiet">Chats are stored only in this tab, until you close it.</span></p></form>
  </section>`;
}
