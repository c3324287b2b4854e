// Video jobs: queue, progress, and a player for completed videos.
import { html, useEffect, useState } from "/ui/vendor/preact.js";
import { Nothing, Wrong, ask, call, useAction, usePolled, when } from "/ui/shared.js";

function Player({ id }) {
  const [url, setUrl] = useState("");
  const [load, { busy, error }] = useAction(async () => {
    const clip = await (await ask("GET", `/v1/videos/${encodeURIComponent(id)}/content`)).blob();
    setUrl(URL.createObjectURL(clip));
  });
  useEffect(() => () => { if (url) URL.revokeObjectURL(url); }, [url]);
  return url ? html`<video src=${url} controls loop muted autoplay></video>`
    : html`<button disabled=${busy} onClick=${load}>Play</button><${Wrong} text=${error} />`;
}

const isOpen = (job) => job.status === "queued" || job.status === "in_progress";

function Job({ job, reload }) {
  const [end, { busy, error }] = useAction(async (method, path) => { await call(method, path); reload(); });
  const path = `/v1/videos/${encodeURIComponent(job.id)}`;
  const open = isOpen(job);
  return html`<section class="card" aria-label=${job.id}><div class="row spread"><h3>${job.model}</h3><span class=${`badge ${job.status === "failed" ? "bad" : "good"}`}>${job.status}</span></div>
    <p class="says">${job.prompt ?? ""}</p>
    <p class="small quiet">${job.size}, ${job.seconds} s, ${when(job.created_at)}${job.phase ? `: ${job.phase}` : ""}</p>
    ${open ? html`<progress max="100" value=${job.progress} aria-label=${`Progress of ${job.id}`}></progress>` : null}
    <${Wrong} text=${job.error?.message || error} />
    ${job.status === "completed" ? html`<${Player} id=${job.id} />` : null}
    <p class="row">${open ? html`<button disabled=${busy} onClick=${() => end("POST", `${path}/cancel`)}>Cancel</button>` : html`<button disabled=${busy} onClick=${() => end("DELETE", path)}>Delete</button>`}</p></section>`;
}

export function Videos() {
  const [list, error, reload] = usePolled("/v1/videos?limit=50&order=desc", (list) => list?.data.some(isOpen) ? 1000 : 5000);
  if (!list) return html`<${Wrong} text=${error} />`;
  if (!list.data.length) return html`<${Wrong} text=${error} /><${Nothing}>There are no video jobs.<//>`;
  return html`<${Wrong} text=${error} /><div class="cards">${list.data.map((job) => html`<${Job} key=${job.id} job=${job} reload=${reload} />`)}</div>`;
}
