// What every view uses: the API, the live stream, sizes and times as people read them.
import { html, useEffect, useState } from "/ui/vendor/preact.js";

const KEY = "macpool-key";
const GIB = 2 ** 30, MIB = 2 ** 20, KIB = 2 ** 10;

export const key = () => localStorage.getItem(KEY) ?? "";
export const keep = (text) => localStorage.setItem(KEY, text);
export const forget = () => localStorage.removeItem(KEY);

export class Refused extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the coordinator answered ${status}`);
    this.status = status;
    this.code = body?.error?.code ?? "";
  }
}

async function refused(answer) {
  const body = await answer.json().catch(() => null);
  if (answer.status === 401 && key()) {
    forget();
    dispatchEvent(new Event("macpool-out"));
  }
  return new Refused(answer.status, body);
}

export async function ask(method, path, body, signal) {
  const headers = { authorization: `Bearer ${key()}` };
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  if (!answer.ok) throw await refused(answer);
  return answer;
}

export const call = async (method, path, body) => (await ask(method, path, body)).json();

// The data of each event as it comes; ends with the stream.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (waiting + value).split("\n\n");
    waiting = pieces.pop();
    for (const piece of pieces) {
      const event = { name: "message", data: "" };
      for (const line of piece.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) yield event;
    }
  }
}

// The pool as it is now; `live` is false while the line is down.
export function useLive(on) {
  const [state, setState] = useState({ live: false });
  useEffect(() => {
    if (!on) return;
    const stop = new AbortController();
    const follow = async () => {
      let pause = 500;
      while (!stop.signal.aborted) {
        try {
          const answer = await ask("GET", "/api/v1/live?follow=true", undefined, stop.signal);
          pause = 500;
          for await (const { name, data } of events(answer))
            setState((old) => ({ ...old, live: true, [name]: JSON.parse(data) }));
        } catch (error) {
          if (stop.signal.aborted || error.status === 401) return;
          if (error.status === 403) return setState({ live: false, barred: error.message });
        }
        setState((old) => ({ ...old, live: false }));
        await new Promise((then) => setTimeout(then, pause));
        pause = Math.min(pause * 2, 10000);
      }
    };
    follow();
    return () => stop.abort();
  }, [on]);
  return state;
}

// An action of the user: its result or its refusal, and whether it is under way.
export function useAction(act) {
  const [state, setState] = useState({ busy: false, error: "", done: null });
  const run = async (...given) => {
    setState({ busy: true, error: "", done: null });
    try {
      const done = await act(...given);
      setState({ busy: false, error: "", done });
      return done;
    } catch (error) {
      setState({ busy: false, error: error.message, done: null });
      return undefined;
    }
  };
  return [run, state];
}

// Something that is asked for now and whenever `reload` is called.
export function useAsked(path) {
  const [state, setState] = useState({ value: null, error: "" });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    let here = true;
    call("GET", path).then(
      (value) => here && setState({ value, error: "" }),
      (error) => here && setState({ value: null, error: error.message }),
    );
    return () => { here = false; };
  }, [path, turn]);
  return [state.value, state.error, () => setTurn((old) => old + 1)];
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "unknown";
  const [unit, name] = Math.abs(bytes) >= GIB ? [GIB, "GiB"] : Math.abs(bytes) >= MIB ? [MIB, "MiB"] : [KIB, "KiB"];
  return `${(bytes / unit).toFixed(1)} ${name}`;
}

export const seconds = (value) => value === null || value === undefined ? "–" : value < 10 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
export const count = (value) => (value ?? 0).toLocaleString("en");
export const when = (unix) => unix ? new Date(unix * 1000).toLocaleString() : "never";

export const Wrong = ({ text }) => text ? html`<p class="bad" role="alert">${text}</p>` : null;
export const Nothing = ({ children }) => html`<p class="quiet">${children}</p>`;

export function Table({ caption, head, rows }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table>
    <thead><tr>${head.map((name) => html`<th scope="col" class=${name.startsWith("#") ? "number" : ""}>${name.replace("#", "")}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key}>${row.cells.map((cell, at) => html`<td class=${head[at].startsWith("#") ? "number" : ""}>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}
