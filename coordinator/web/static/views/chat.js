// A chat: which node answers, how soon, how fast. What is said is kept nowhere but on this page.
import { html, useRef, useState } from "/ui/vendor/preact.js";
import { Nothing, Wrong, ask, count, events, seconds } from "/ui/pool.js";

async function answer(model, turns, signal, tell) {
  const began = performance.now();
  const messages = turns.map(({ role, text }) => ({ role, content: text }));
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  const said = await ask("POST", "/v1/chat/completions", body, signal);
  const turn = { role: "assistant", text: "", thought: "", node: said.headers.get("x-macpool-node") ?? "" };
  for await (const { data } of events(said)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices[0]?.delta ?? {};
    if (turn.first === undefined && (delta.content || delta.reasoning_content)) turn.first = (performance.now() - began) / 1000;
    turn.text += delta.content ?? "";
    turn.thought += delta.reasoning_content ?? "";
    if (chunk.usage) turn.tokens = chunk.usage.completion_tokens;
    turn.took = (performance.now() - began) / 1000;
    tell({ ...turn });
  }
}

function About({ turn }) {
  const rate = turn.tokens > 1 && turn.took > turn.first ? (turn.tokens - 1) / (turn.took - turn.first) : 0;
  return html`<p class="small quiet">${turn.node ? `by ${turn.node}` : ""}${turn.first === undefined ? "" : `, first token after ${seconds(turn.first)}`}${turn.tokens ? `, ${count(turn.tokens)} tokens` : ""}${rate ? `, ${rate.toFixed(1)} tokens/s` : ""}</p>`;
}

export function Chat({ pool }) {
  const names = pool.status?.models ?? [];
  const [picked, setPicked] = useState("");
  const [turns, setTurns] = useState([]);
  const [text, setText] = useState("");
  const [error, setError] = useState("");
  const running = useRef(null);
  const [busy, setBusy] = useState(false);
  const model = picked || names[0] || "";
  const send = async (event) => {
    event.preventDefault();
    if (!text.trim() || busy) return;
    const asked = [...turns, { role: "user", text }];
    setTurns(asked); setText(""); setError(""); setBusy(true);
    running.current = new AbortController();
    try {
      await answer(model, asked, running.current.signal, (turn) => setTurns([...asked, turn]));
    } catch (wrong) {
      if (wrong.name !== "AbortError") setError(wrong.message);
    }
    setBusy(false);
  };
  if (!names.length) return html`<${Nothing}>No model is served yet.<//>`;
  return html`<section class="card">
    <label>Model <select value=${model} onChange=${(event) => setPicked(event.target.value)}>${names.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
    <div aria-live="polite" aria-busy=${busy}>${turns.map((turn, at) => html`<div key=${at} class=${`turn ${turn.role}`}>
      ${turn.thought ? html`<details><summary>Thought</summary><div class="says quiet">${turn.thought}</div></details>` : null}
      <div class="says">${turn.text}</div>${turn.role === "assistant" ? html`<${About} turn=${turn} />` : null}</div>`)}</div>
    <${Wrong} text=${error} />
    <form onSubmit=${send}><label for="said">Your message</label>
      <textarea id="said" value=${text} onInput=${(event) => setText(event.target.value)}
        onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey) send(event); }}></textarea>
      <p class="row"><button class="main" disabled=${busy || !text.trim()}>Send</button>
        ${busy ? html`<button type="button" onClick=${() => running.current?.abort()}>Stop</button>` : null}
        ${turns.length && !busy ? html`<button type="button" onClick=${() => { setTurns([]); setError(""); }}>Begin anew</button>` : null}</p></form>
  </section>`;
}
