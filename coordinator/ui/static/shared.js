// Shared by all views: the API, the live stream, the load of the last hour, formatting of sizes and times.
import { html, useEffect, useRef, useState } from "/ui/vendor/preact.js";

const KEY = "macpool-key";
const VISIT = "macpool-visit";
export const CHATS = "macpool-chats";
const GIB = 2 ** 30, MIB = 2 ** 20, KIB = 2 ** 10;
const POINTS = 360;
// A live stream without a byte for this time is opened again: the coordinator sends a comment after 15 s of silence.
const SILENT_MS = 40000;
// Pause after a failed connection.
const RETRY_MS = 2000;
// Time until the live stream has a command that was just started.
const UNSEEN_MS = 3000;
const HIDDEN = "the tab is hidden";
const NO_ANSWER = "The coordinator does not answer";
const ENDED = "The key of this page has expired, was revoked, or was lost when the coordinator restarted: sign in again.";
// States in which a Mac's report is of now.
export const PRESENT = ["ready", "suspect", "draining"];

export const key = () => localStorage.getItem(KEY) ?? "";
// Random name of the current sign-in, which all tabs share. Chats of an earlier sign-in may be those of another person.
export const visit = () => localStorage.getItem(VISIT) ?? "";
export const keep = (text) => {
  localStorage.setItem(VISIT, crypto.getRandomValues(new Uint32Array(2)).join("-"));
  localStorage.setItem(KEY, text);
};

function endTab(why = "") {
  sessionStorage.removeItem(CHATS);
  dispatchEvent(new CustomEvent("macpool-out", { detail: why }));
}

export const forget = (why) => {
  localStorage.removeItem(KEY);
  localStorage.removeItem(VISIT);
  endTab(why);
};

// Another tab has signed out, or signed in with another key.
addEventListener("storage", ({ key: name }) => {
  if (name === KEY || name === null) endTab();
});

export class Refused extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the coordinator answered ${status}`);
    this.status = status;
    this.code = body?.error?.code ?? "";
  }
}

// A refusal for another reason than the key, such as a used link, ends no session.
async function refused(answer, used) {
  const body = await answer.json().catch(() => null);
  if (answer.status === 401 && body?.error?.code === "invalid_api_key" && used === key()) forget(ENDED);
  return new Refused(answer.status, body);
}

// Browsers have a text of their own for a failed connection, such as "Failed to fetch".
const lost = (wrong) => { throw wrong instanceof TypeError ? new Error(NO_ANSWER) : wrong; };

export async function ask(method, path, body, signal, prefer) {
  const used = key();
  const headers = new Headers({ authorization: `Bearer ${used}` });
  if (body !== undefined) headers.set("content-type", "application/json");
  if (prefer) headers.set("prefer", prefer);
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal }).catch(lost);
  if (!answer.ok) throw await refused(answer, used);
  return answer;
}

export const call = async (method, path, body) => (await ask(method, path, body)).json();

// The key of this page: name and scopes. A key without the scope `infer` cannot ask for itself.
export async function ownKey() {
  try {
    const own = await call("GET", "/api/v1/key");
    const admin = own.scopes.includes("admin");
    return { ...own, admin, metrics: admin || own.scopes.includes("metrics"), infer: true };
  } catch (wrong) {
    if (wrong.status !== 403) throw wrong;
    await call("GET", "/api/v1/status");
    return { name: "", scopes: ["metrics"], limits: {}, admin: false, metrics: true, infer: false };
  }
}

// The data of each event as it comes; ends with the stream. `heard` is called whenever bytes arrive, also for comments.
export async function* events(answer, heard = () => {}) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done) return;
    heard();
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

// The pool as it is now; `live` is false while the stream is down, and `error` is the reason if there is one. A hidden tab has
// no stream: browsers allow six connections to a server, for all tabs together.
export function useLive(on) {
  const [state, setState] = useState({ live: false, error: "" });
  useEffect(() => {
    if (!on) return;
    let ended = false;
    let stream;
    const hide = () => { if (document.hidden) stream?.abort(HIDDEN); };
    const follow = async () => {
      let pause = 500;
      while (!ended) {
        if (document.hidden) {
          await new Promise((then) => document.addEventListener("visibilitychange", then, { once: true }));
          continue;
        }
        const own = stream = new AbortController();
        let silence, error = "";
        const heard = () => {
          clearTimeout(silence);
          silence = setTimeout(() => own.abort(), SILENT_MS);
        };
        heard();
        try {
          const answer = await ask("GET", "/api/v1/live?follow=true", undefined, own.signal);
          pause = 500;
          for await (const { name, data } of events(answer, heard))
            setState((old) => ({ ...old, live: true, error: "", [name]: JSON.parse(data) }));
        } catch (wrong) {
          if (ended || wrong.status === 401) return;
          if (own.signal.reason === HIDDEN) continue;
          error = own.signal.aborted ? NO_ANSWER : wrong.message;
        } finally {
          clearTimeout(silence);
        }
        setState((old) => ({ ...old, live: false, error }));
        await new Promise((then) => setTimeout(then, pause));
        pause = Math.min(pause * 2, 10000);
      }
    };
    document.addEventListener("visibilitychange", hide);
    follow();
    return () => {
      ended = true;
      document.removeEventListener("visibilitychange", hide);
      stream?.abort();
    };
  }, [on]);
  return state;
}

const appended = (old, one) => Object.fromEntries(Object.entries(one).map(([name, values]) => [name, [...(old?.[name] ?? []), ...values].slice(-POINTS)]));

// The load of the last hour: asked for once, then each new point of the live stream is added to it.
export function useHistory(newest) {
  const [history, setHistory] = useState(null);
  const asking = useRef(false);
  useEffect(() => {
    if (!newest || asking.current || history?.number === newest.number) return;
    if (history && newest.number === history.number + 1) {
      const nodes = Object.fromEntries(Object.entries(newest.nodes).map(([id, one]) => [id, appended(history.nodes[id], one)]));
      setHistory({ ...newest, pool: appended(history.pool, newest.pool), nodes });
      return;
    }
    asking.current = true;
    call("GET", "/api/v1/history").then(setHistory, () => null).finally(() => { asking.current = false; });
  }, [newest?.number]);
  return history;
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

// Commands of the live stream, the newest first, and a function that starts one about a model, which is answered before its end:
// browsers allow six connections to a server. `announce` gets each completed command that was started here, the oldest first.
export function useCommands(rows, announce) {
  const mine = useRef(new Set());
  const [fresh, setFresh] = useState([]);
  const start = async (verb, body) => {
    const { command } = await (await ask("POST", `/api/v1/models/${verb}`, body, undefined, "respond-async")).json();
    mine.current.add(command.id);
    setFresh((old) => [command, ...old]);
    setTimeout(() => setFresh((old) => old.filter((one) => one !== command)), UNSEEN_MS);
  };
  useEffect(() => {
    for (const row of [...rows].reverse()) if (row.state === "completed" && mine.current.delete(row.id)) announce(row);
  }, [rows, fresh]);
  return [[...fresh.filter((one) => !rows.some((row) => row.id === one.id)), ...rows], start];
}

// Something that is asked for now, whenever `reload` is called, and again after a failed connection; nothing while there is no
// path. After a failed reload the latest value of the path stays. The last result is the number of answers.
export function useAsked(path) {
  const [state, setState] = useState({ value: null, error: "", answers: 0 });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (!path) return;
    let here = true, timer = 0;
    call("GET", path).then(
      (value) => here && setState((old) => ({ path, value, error: "", answers: old.answers + 1 })),
      (error) => {
        if (!here) return;
        setState((old) => ({ path, value: old.path === path ? old.value : null, error: error.message, answers: old.answers + 1 }));
        if (!error.status) timer = setTimeout(() => setTurn((old) => old + 1), RETRY_MS);
      },
    );
    return () => {
      here = false;
      clearTimeout(timer);
    };
  }, [path, turn]);
  return [state.value, state.error, () => setTurn((old) => old + 1), state.answers];
}

// As `useAsked`, and asked for again `pauseMs(value)` after each answer. A slow answer delays the next request.
export function usePolled(path, pauseMs) {
  const [value, error, reload, answers] = useAsked(path);
  const pause = pauseMs(value);
  useEffect(() => {
    if (!answers) return;
    const timer = setTimeout(reload, pause);
    return () => clearTimeout(timer);
  }, [answers, pause]);
  return [value, error, reload];
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "unknown";
  const [unit, name] = Math.abs(bytes) >= GIB ? [GIB, "GiB"] : Math.abs(bytes) >= MIB ? [MIB, "MiB"] : [KIB, "KiB"];
  return `${(bytes / unit).toFixed(1)} ${name}`;
}

export const seconds = (value) => value === null || value === undefined ? "–" : value < 10 ? `${value.toFixed(2)} s` : value < 120 ? `${Math.round(value)} s` : value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
export const count = (value) => (value ?? 0).toLocaleString("en");
export const rate = (value) => value === null || value === undefined ? "–" : value < 10 ? value.toFixed(1) : count(Math.round(value));
export const when = (unix) => unix ? new Date(unix * 1000).toLocaleString() : "never";

// The clock time of a moment, with its date where that is not today.
export function clock(unix) {
  const at = new Date(unix * 1000);
  const today = at.toDateString() === new Date().toDateString();
  return today ? at.toLocaleTimeString() : `${at.toLocaleDateString()} ${at.toLocaleTimeString()}`;
}

// `navigator.clipboard` exists only where the page is a secure context: HTTPS or localhost.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const act = async () => {
    await copy(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class="small" onClick=${act}>${done ? "Copied" : label}</button>`;
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export const Wrong = ({ text }) => text ? html`<p class="bad" role="alert">${text}</p>` : null;
export const Nothing = ({ children }) => html`<p class="quiet">${children}</p>`;

export function Table({ caption, head, rows }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table>
    <thead><tr>${head.map((name) => html`<th scope="col" class=${name.startsWith("#") ? "number" : ""}>${name.replace("#", "")}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key}>${row.cells.map((cell, at) => html`<td class=${head[at].startsWith("#") ? "number" : ""}>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}
