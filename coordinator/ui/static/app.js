// The shell: whose key this is, which view, and the one live stream that all views read.
import { html, render, useEffect, useRef, useState } from "/ui/vendor/preact.js";
import { Wrong, call, forget, keep, key, ownKey, useAction, useLive, visit } from "/ui/shared.js";
import { Chat } from "/ui/views/chat.js";
import { Join } from "/ui/views/join.js";
import { Keys } from "/ui/views/keys.js";
import { Models } from "/ui/views/models.js";
import { Pool } from "/ui/views/pool.js";
import { Requests } from "/ui/views/requests.js";
import { Runbook } from "/ui/views/runbook.js";
import { Settings } from "/ui/views/settings.js";
import { OwnUsage } from "/ui/views/usage.js";
import { Videos } from "/ui/views/videos.js";

// Each view with the keys that it is for.
const VIEWS = {
  pool: ["Pool", Pool, (own) => own.metrics],
  requests: ["Requests", Requests, (own) => own.metrics],
  models: ["Models", Models, () => true],
  videos: ["Videos", Videos, (own) => own.infer],
  chat: ["Chat", Chat, (own) => own.infer],
  usage: ["Usage", OwnUsage, (own) => own.infer && !own.admin],
  join: ["Join", Join, (own) => own.admin],
  keys: ["Keys and usage", Keys, (own) => own.admin],
  settings: ["Settings", Settings, (own) => own.admin],
  runbook: ["Runbook", Runbook, (own) => own.metrics],
};
// Views that are linked to and stand in no menu.
const LINKED = ["runbook"];
const THEME = "macpool-theme";

const decoded = (part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;  // it is no valid address, as "%"
  }
};
const place = () => location.hash.slice(2).split("/").map(decoded);

function useView() {
  const [parts, setParts] = useState(place());
  useEffect(() => {
    const follow = () => setParts(place());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return parts;
}

function useTheme() {
  const [theme, setTheme] = useState(localStorage.getItem(THEME) ?? "");
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem(THEME, theme);
  }, [theme]);
  return [theme, setTheme];
}

function SignIn({ entered }) {
  const [text, setText] = useState("");
  const [enter, { busy, error }] = useAction(async () => {
    keep(text.trim());
    try {
      await ownKey();
    } catch (refused) {
      forget();
      throw refused;
    }
    entered();
  });
  return html`<main class="sign-in"><div class="card">
    <h2>Sign in to Macpool</h2>
    <p>On the Mac that runs the coordinator, run <code>cluster open</code>. It opens this page with a one-time link.</p>
    <form onSubmit=${(event) => { event.preventDefault(); enter(); }}>
      <label>Or enter an API key <input type="password" autocomplete="off" required value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <p><button class="main" disabled=${busy}>Sign in</button></p>
    </form>
    <p class="small quiet">A key with the scope infer shows chat, models and its own usage; metrics shows the pool and its requests; admin shows everything.</p>
    <${Wrong} text=${error} />
  </div></main>`;
}

function Page({ own }) {
  const [view, ...rest] = useView();
  const [theme, setTheme] = useTheme();
  const pool = useLive(own.metrics);
  const version = pool.status?.version;
  const loaded = useRef(version);
  loaded.current ??= version;
  const leave = () => {
    if (own.admin) call("DELETE", "/api/v1/page/visit").catch(() => null);
    forget();
  };
  const offered = Object.entries(VIEWS).filter(([, [, , allowed]]) => allowed(own));
  const name = offered.some(([id]) => id === view) ? view : own.metrics ? "pool" : "chat";
  const [title, View] = VIEWS[name];
  useEffect(() => {
    document.title = `${title} – Macpool`;
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }, [title]);
  return html`
    <header>
      <h1><img src="/ui/icon.svg" alt="" /> ${pool.status?.cluster.name ?? "Macpool"}</h1>
      <nav aria-label="Views">${offered.filter(([id]) => !LINKED.includes(id)).map(([id, [label]]) => html`<a href=${`#/${id}`} aria-current=${id === name ? "page" : null}>${label}</a>`)}</nav>
      <label><span class="wide small">Theme</span> <select aria-label="Theme" value=${theme} onChange=${(event) => setTheme(event.target.value)}>
        <option value="">System</option><option value="light">Light</option><option value="dark">Dark</option></select></label>
      <button onClick=${leave}>Sign out</button>
    </header>
    ${!pool.live && (pool.status || pool.error) ? html`<div class="gone" role="status">${pool.error || "The coordinator does not answer"}.${pool.status ? " The data on this page may be outdated." : ""} Retrying.</div>` : null}
    ${version !== loaded.current ? html`<div class="gone" role="status">The coordinator has been updated to version ${version}, but this page is version ${loaded.current}. <button onClick=${() => location.reload()}>Reload</button></div>` : null}
    <main aria-label=${title}><h2>${title}</h2><${View} pool=${pool} own=${own} rest=${rest} /></main>`;
}

// Code of a link of `cluster open` in the address; empty without one. A link that is opened in an open page changes only the
// part behind the `#`, and loads nothing.
const codeOf = () => location.hash.startsWith("#in=") ? location.hash.slice(4) : "";
// Name of the sign-in of this tab; empty without a key.
const signedIn = () => key() && (visit() || "signed in");

function App() {
  const [inside, setInside] = useState(signedIn);
  const [own, setOwn] = useState(null);
  const [error, setError] = useState("");
  const [code, setCode] = useState(codeOf);
  const opened = useRef(inside);
  opened.current = inside;
  // The form itself says why it refuses a key.
  const out = ({ detail }) => { setError(opened.current ? detail : ""); setInside(signedIn()); setOwn(null); };
  useEffect(() => {
    const open = () => { if (codeOf()) location.reload(); };
    addEventListener("macpool-out", out);
    addEventListener("hashchange", open);
    return () => { removeEventListener("macpool-out", out); removeEventListener("hashchange", open); };
  }, []);
  useEffect(() => {
    if (!code) return;
    history.replaceState(null, "", "/");
    call("POST", "/api/v1/page/visits", { code }).then((given) => { keep(given.key); setInside(signedIn()); },
      (refused) => setError(refused.message)).finally(() => setCode(""));
  }, [code]);
  useEffect(() => {
    if (code || !inside || own) return;
    let timer = 0;
    let current = true;
    const find = () => ownKey().then((found) => { if (current) setOwn(found); }, (wrong) => {
      if (!current) return;
      setError(wrong.message);
      if (wrong.status !== 401) timer = setTimeout(find, 2000);
    });
    find();
    return () => { current = false; clearTimeout(timer); };
  }, [code, inside, own]);
  if (code || (inside && !own)) return html`<main class="sign-in" aria-busy="true"><p>Signing in …</p><${Wrong} text=${error} /></main>`;
  if (inside) return html`<${Page} own=${own} />`;
  return html`<${SignIn} entered=${() => { setError(""); setInside(signedIn()); }} /><div class="sign-in"><${Wrong} text=${error} /></div>`;
}

render(html`<${App} />`, document.getElementById("app"));
