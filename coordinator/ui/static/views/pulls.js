// Pulls of models from the hub: the plan of a new pull, and the progress of each pull on every Mac.
import { html, useRef, useState } from "/ui/vendor/preact.js";
import { Table, Wrong, call, clock, count, seconds, size, useAction } from "/ui/shared.js";

const SELECTIONS = [["auto", "Every linked Mac with room"], ["all", "Every Mac with room, including offline Macs"], ["named", "These Macs:"]];
const REPLAN_MS = 400;
// Time in which an ended pull is shown without a click.
const RECENT_SECONDS = 3600;
const BADGES = { pulling: "warn", completed: "good", failed: "bad" };

// The plan of the newest question; the answers of earlier questions are ignored.
function usePlan() {
  const [state, setState] = useState({ plan: null, busy: false, error: "" });
  const newest = useRef(0);
  const drop = () => {
    newest.current += 1;
    setState({ plan: null, busy: false, error: "" });
  };
  const ask = async (body, wait) => {
    newest.current += 1;
    const turn = newest.current;
    setState((old) => ({ ...old, busy: true, error: "" }));
    await new Promise((then) => setTimeout(then, wait));
    if (turn !== newest.current) return;
    try {
      const plan = await call("POST", "/api/v1/pulls", { ...body, dry_run: true });
      if (turn === newest.current) setState({ plan, busy: false, error: "" });
    } catch (wrong) {
      if (turn === newest.current) setState((old) => ({ ...old, busy: false, error: wrong.message }));
    }
  };
  return [state, ask, drop];
}

function describeModel({ repo, commit, size: bytes, files, skipped, model }) {
  const parts = [`${size(bytes)} in ${count(files)} files`, model.quantization, `context of ${count(model.context)} tokens`].filter(Boolean);
  return `${repo} at ${commit.slice(0, 8)}: ${parts.join(", ")}.${skipped.files ? ` Not needed: ${count(skipped.files)} files, ${size(skipped.size)}.` : ""}`;
}

function Plan({ plan, busy, error, selection, named, select, pick, start, close }) {
  const [run, starting] = useAction(start);
  const byName = selection === "named";
  const chosen = busy || error ? 0 : plan.nodes.filter((node) => node.chosen && (!byName || named.includes(node.id))).length;
  const decision = (node) => {
    if (byName && !named.includes(node.id)) return "no";
    if (busy) return "…";
    return html`<div class=${node.reason ? "reason" : ""}>${node.chosen ? html`<b class="good">yes</b>` : "no"}${node.reason ? `: ${node.reason}` : ""}</div>`;
  };
  const mac = (node) => byName ? html`<label class="choice"><input type="checkbox" aria-label=${`Pull to ${node.name}`} checked=${named.includes(node.id)} onChange=${() => pick(node.id)} /> ${node.name}</label>` : node.name;
  return html`<p>${describeModel(plan)}</p>
    <fieldset><legend>Pull to</legend>${SELECTIONS.map(([value, label]) => html`<label class="choice"><input type="radio" name="selection" value=${value} checked=${selection === value} onChange=${() => select(value)} /> ${label}</label>`)}</fieldset>
    <div aria-busy=${busy}><${Table} caption="Plan of the pull" head=${["Mac", "pull", "#disk free", "#max context"]} rows=${plan.nodes.map((node) => ({ key: node.id,
      cells: [mac(node), decision(node), node.disk_free ? size(node.disk_free) : "unknown", node.max_context ? count(node.max_context) : "–"] }))} /></div>
    <${Wrong} text=${starting.error} />
    <p class="row"><button class="main" disabled=${!chosen || starting.busy} onClick=${run}>${`Pull to ${chosen} ${chosen === 1 ? "Mac" : "Macs"}`}</button><button onClick=${close}>Close</button></p>`;
}

export function NewPull({ announce }) {
  const [repo, setRepo] = useState("");
  const [revision, setRevision] = useState("");
  const [selection, setSelection] = useState("auto");
  const [named, setNamed] = useState([]);
  const [{ plan, busy, error }, ask, drop] = usePlan();
  const body = (how, ids) => ({ repo: repo.trim(), revision: revision.trim(), nodes: how === "named" ? ids : [], all: how === "all" });
  const replan = (how, ids, wait) => { if (how !== "named" || ids.length) ask(body(how, ids), wait); };
  const close = () => {
    setSelection("auto");
    setNamed([]);
    drop();
  };
  const edit = (set) => (event) => { set(event.target.value); close(); };
  const select = (how) => { setSelection(how); replan(how, named, 0); };
  const pick = (id) => {
    const ids = named.includes(id) ? named.filter((one) => one !== id) : [...named, id];
    setNamed(ids);
    replan(selection, ids, REPLAN_MS);
  };
  const submit = (event) => {
    event.preventDefault();
    if (selection === "named" && !named.length) select("auto");
    else replan(selection, named, 0);
  };
  const start = async () => {
    const { pull } = await call("POST", "/api/v1/pulls", body(selection, named));
    announce(`The pull of ${pull.repo} has started.`);
    setRepo("");
    setRevision("");
    close();
  };
  return html`<section class="card" aria-label="Pull a model"><h3>Pull a model</h3>
    <form onSubmit=${submit}>
      <div class="fill"><label>Repository <input required minlength="3" maxlength="200" autocomplete="off" spellcheck="false" placeholder="mlx-community/Qwen3-8B-4bit" value=${repo} onInput=${edit(setRepo)} /></label>
        <label>Revision <input maxlength="200" autocomplete="off" spellcheck="false" placeholder="main" value=${revision} onInput=${edit(setRevision)} /></label>
        <button class=${plan ? "" : "main"} disabled=${busy || !repo.trim()}>Show the plan</button></div>
      <p class="small quiet" role="status">${busy ? "Asking the hub …" : ""}</p></form>
    <${Wrong} text=${error} />
    ${plan ? html`<${Plan} plan=${plan} busy=${busy} error=${error} selection=${selection} named=${named} select=${select} pick=${pick} start=${start} close=${close} />` : null}</section>`;
}

function describeProgress(pull, node) {
  if (node.state === "completed") return node.fetched ? `${size(node.fetched)} received` : "already had the files";
  if (node.state === "waiting") return node.linked ? "for a source" : "until the Mac is back";
  if (node.state !== "pulling") return "";
  if (!node.total) return "starting";
  const left = node.seconds_left === null ? "" : `, ${node.seconds_left < 10 ? `${Math.ceil(node.seconds_left)} s` : seconds(node.seconds_left)} left`;
  const source = node.source === "mirror" ? pull.mirror ?? "another Mac" : "the hub";
  const phase = node.phase === "downloading" ? "" : `${node.phase}, `;
  return `${phase}${size(node.done)} of ${size(node.total)} from ${source}, ${size(node.speed)}/s${left}`;
}

const NodeProgress = ({ pull, node }) => html`<li>${node.name}: <b class=${node.state === "failed" ? "bad" : ""}>${node.state}</b> <span class="small quiet">${describeProgress(pull, node)}</span>
  ${node.state === "pulling" ? html`<progress max="1" value=${node.total ? node.done / node.total : 0} aria-label=${`Pull of ${pull.repo} to ${node.name}`}></progress>` : null}
  ${node.state === "failed" ? html`<${Wrong} text=${node.message} />` : node.message ? html`<p class="small warn">${node.message}</p>` : null}</li>`;

function Pull({ pull, own, announce }) {
  const [cancel, { busy, error }] = useAction(async () => {
    await call("DELETE", `/api/v1/pulls/${encodeURIComponent(pull.id)}`);
    announce(`The pull of ${pull.repo} was cancelled. Received parts stay on the disks.`);
  });
  return html`<div role="group" class="pull" aria-label=${`Pull of ${pull.repo}`}>
    <div class="row spread"><h4>${pull.repo}</h4><span class="row">${own.admin && pull.state === "pulling" ? html`<button class="small" aria-label=${`Cancel the pull of ${pull.repo}`} disabled=${busy} onClick=${cancel}>Cancel</button>` : null}
      <span class=${`badge ${BADGES[pull.state] ?? "quiet"}`} role="status">${pull.state}</span></span></div>
    <p class="small quiet">${pull.revision} at ${pull.commit.slice(0, 8)}, ${size(pull.size)} in ${count(pull.files)} files, ${pull.ended === null ? `started ${clock(pull.started)}` : `ended ${clock(pull.ended)}`}</p>
    <ul class="places">${pull.nodes.map((node) => html`<${NodeProgress} key=${node.id} pull=${pull} node=${node} />`)}</ul><${Wrong} text=${error} /></div>`;
}

export function Pulls({ pulls, own, announce }) {
  const isRecent = (pull) => pull.ended === null || Date.now() / 1000 - pull.ended < RECENT_SECONDS;
  const recent = pulls.filter(isRecent), older = pulls.filter((pull) => !isRecent(pull));
  const list = (rows) => rows.map((pull) => html`<${Pull} key=${pull.id} pull=${pull} own=${own} announce=${announce} />`);
  if (!pulls.length) return null;
  return html`<section class="card" aria-label="Pulls"><h3>Pulls</h3>${list(recent)}
    ${older.length ? html`<details><summary>Older pulls: ${older.length}</summary>${list(older)}</details>` : null}</section>`;
}
