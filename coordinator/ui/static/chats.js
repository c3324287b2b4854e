// The chats of this tab. They outlive a change of the view and a reload, and end with the tab or with signing out; an
// answer continues to stream while another view is open.
import { useEffect, useState } from "/ui/vendor/preact.js";
import { CHATS, ask, events, visit } from "/ui/shared.js";

const MAX_CHATS = 20;
const SHOW_MS = 50;
const fresh = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), turns: [], model: "", system: "", temperature: "", top_p: "", max_tokens: "" });

function stored() {
  try {
    const found = JSON.parse(sessionStorage.getItem(CHATS) ?? "");
    if (found.visit === visit() && found.chats.length && found.chats.every((one) => Array.isArray(one.turns))) return found;
  } catch {
    // nothing is kept yet, or not by us
  }
  const first = fresh();
  return { chats: [first], current: first.id };
}

let state = stored();
let running = null;
const readers = new Set();

function put(next, keep = true) {
  state = next;
  if (keep) {
    try {
      sessionStorage.setItem(CHATS, JSON.stringify({ ...state, visit: visit() }));
    } catch {
      // the browser has no room: the chats live as long as the page
    }
  }
  for (const read of readers) read({});
}

// Signing out ends the answer in progress, and nothing of it is stored afterwards.
addEventListener("macpool-out", () => {
  stop();
  running = null;
  state = stored();
});

const change = (id, changes, keep) => put({ ...state, chats: state.chats.map((one) => one.id === id ? { ...one, ...changes } : one) }, keep);

export function useChats() {
  const [, read] = useState({});
  useEffect(() => {
    if (!sessionStorage.getItem(CHATS)) state = stored();
    readers.add(read);
    read({});
    return () => readers.delete(read);
  }, []);
  return { ...state, chat: state.chats.find((one) => one.id === state.current) ?? state.chats[0], busy: running?.chat ?? "" };
}

export const pick = (id) => put({ ...state, current: id });
export const set = (id, changes) => change(id, changes);
export const stop = () => running?.stop.abort();

export function begin(like) {
  const made = { ...fresh(), model: like.model, system: like.system, temperature: like.temperature, top_p: like.top_p, max_tokens: like.max_tokens };
  const kept = state.chats.filter((one) => one.turns.length);
  while (kept.length >= MAX_CHATS) kept.splice(kept.findLastIndex((one) => one.id !== running?.chat), 1);
  put({ chats: [made, ...kept], current: made.id });
}

export function drop(id) {
  const left = state.chats.filter((one) => one.id !== id);
  const chats = left.length ? left : [fresh()];
  put({ chats, current: chats[0].id });
}

// A message without an answer is sent in one with the next: the chat templates of some models refuse two in a row.
function bodyOf(chat, model, turns) {
  const system = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
  const messages = [];
  for (const { role, text } of turns) {
    if (!text) continue;
    if (messages.at(-1)?.role === role) messages.at(-1).content += `\n\n${text}`;
    else messages.push({ role, content: text });
  }
  const body = { model, messages: [...system, ...messages], stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens"]) if (chat[name] !== "") body[name] = Number(chat[name]);
  return body;
}

// Send `text` in a chat and add its answer as it comes. A refusal or a fault stands in the chat's `error`.
export async function send(chat, model, text) {
  const asked = [...chat.turns, { role: "user", text }];
  change(chat.id, { turns: asked, error: "", model });
  const own = running = { chat: chat.id, stop: new AbortController() };
  const { signal } = own.stop;
  const turn = { role: "assistant", text: "", thought: "", node: "", model };
  let timer = 0;
  const show = (keep = false) => { timer = 0; change(chat.id, { turns: [...asked, { ...turn }] }, keep); };
  const began = performance.now();
  const elapsed = () => (performance.now() - began) / 1000;
  put(state, false);
  try {
    const answer = await ask("POST", "/v1/chat/completions", bodyOf(chat, model, asked), signal);
    turn.node = answer.headers.get("x-macpool-node") ?? "";
    for await (const { data } of events(answer)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta ?? {};
      if (turn.first === undefined && (delta.content || delta.reasoning_content)) turn.first = elapsed();
      turn.text += delta.content ?? "";
      turn.thought += delta.reasoning_content ?? "";
      turn.ended = chunk.choices[0]?.finish_reason ?? turn.ended;
      if (chunk.usage) turn.tokens = chunk.usage.completion_tokens;
      turn.took = elapsed();
      if (!timer) timer = setTimeout(show, SHOW_MS);
    }
  } catch (wrong) {
    if (wrong.name === "AbortError") turn.ended = "stopped";
    else change(chat.id, { error: wrong.message });
  }
  clearTimeout(timer);
  if (running !== own) return;
  running = null;
  if (turn.text || turn.thought) show(true);
  else put(state);
}
