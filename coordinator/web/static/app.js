// The shell: who is here, which view, and the one live stream that all views read.
import { html, render, useEffect, useState } from "/ui/vendor/preact.js";
import { Wrong, call, forget, keep, key, useAction, useLive } from "/ui/pool.js";
import { Chat } from "/ui/views/chat.js";
import { Join } from "/ui/views/join.js";
import { Keys } from "/ui/views/keys.js";
import { Models } from "/ui/views/models.js";
import { Pool } from "/ui/views/pool.js";
import { Requests } from "/ui/views/requests.js";
import { Settings } from "/ui/views/settings.js";
import { Videos } from "/ui/views/videos.js";

const VIEWS = { pool: ["Pool", Pool], requests: ["Requests", Requests], models: ["Models", Models], videos: ["Videos", Videos],
  chat: ["Chat", Chat], join: ["Join", Join], keys: ["Keys and usage", Keys], settings: ["Settings", Settings] };
const THEME = "macpool-theme";

const place = () => location.hash.slice(2).split("/");

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

function Door({ entered }) {
  const [text, setText] = useState("");
  const [enter, { busy, error }] = useAction(async () => {
    keep(text.trim());
    try {
      await call("GET", "/api/v1/version");
    } catch (refused) {
      forget();
      throw refused;
    }
    entered();
  });
  return html`<main class="door"><div class="card">
    <h2>Sign in to Macpool</h2>
    <p>On the Mac that runs the coordinator, type <code>cluster open</code>: it opens this page by a link that works once.</p>
    <form onSubmit=${(event) => { event.preventDefault(); enter(); }}>
      <label>Or an API key <input type="password" autocomplete="off" required value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <p><button class="main" disabled=${busy}>Sign in</button></p>
    </form>
    <${Wrong} text=${error} />
  </div></main>`;
}

function Page({ left }) {
  const [view, ...rest] = useView();
  const [theme, setTheme] = useTheme();
  const pool = useLive(true);
  const [leave] = useAction(async () => {
    await call("DELETE", "/api/v1/page/visit").catch(() => null);
    forget();
    left();
  });
  const name = VIEWS[view] ? view : "pool";
  const [title, View] = VIEWS[name];
  useEffect(() => { document.title = `${title} – Macpool`; }, [title]);
  return html`
    <header>
      <h1><img src="/ui/icon.svg" alt="" /> ${pool.status?.cluster.name ?? "Macpool"}</h1>
      <nav aria-label="Views">${Object.entries(VIEWS).map(([id, [label]]) => html`<a href=${`#/${id}`} aria-current=${id === name ? "page" : null}>${label}</a>`)}</nav>
      <label><span class="wide small">Colours</span> <select aria-label="Colours" value=${theme} onChange=${(event) => setTheme(event.target.value)}>
        <option value="">of the system</option><option value="light">light</option><option value="dark">dark</option></select></label>
      <button onClick=${leave}>Sign out</button>
    </header>
    ${pool.status && !pool.live ? html`<div class="gone" role="status">The coordinator does not answer: what you see is old. Trying again.</div>` : null}
    <main aria-label=${title}><h2>${title}</h2><${Wrong} text=${pool.barred} /><${View} pool=${pool} rest=${rest} /></main>`;
}

function App() {
  const [inside, setInside] = useState(key() !== "");
  const [error, setError] = useState("");
  const [code, setCode] = useState(location.hash.startsWith("#in=") ? location.hash.slice(4) : "");
  useEffect(() => {
    const out = () => setInside(false);
    addEventListener("macpool-out", out);
    return () => removeEventListener("macpool-out", out);
  }, []);
  useEffect(() => {
    if (!code) return;
    history.replaceState(null, "", "/");
    call("POST", "/api/v1/page/visits", { code }).then((given) => { keep(given.key); setInside(true); },
      (refused) => setError(refused.message)).finally(() => setCode(""));
  }, [code]);
  if (code) return html`<main class="door" aria-busy="true"><p>Signing in …</p></main>`;
  if (inside) return html`<${Page} left=${() => setInside(false)} />`;
  return html`<${Door} entered=${() => setInside(true)} /><div class="door"><${Wrong} text=${error} /></div>`;
}

render(html`<${App} />`, document.getElementById("app"));
