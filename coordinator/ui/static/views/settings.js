// Settings of the coordinator: current value and source. They are changed in files, not here.
import { html } from "/ui/vendor/preact.js";
import { Table, Wrong, useAsked } from "/ui/shared.js";

export function Settings({ pool }) {
  const [found, error] = useAsked("/api/v1/settings");
  const { status } = pool;
  return html`${status ? html`<section class="card"><h3>This pool</h3><dl class="facts"><dt>version</dt><dd>${status.version}, protocol ${status.protocol}</dd>
      <dt>endpoint</dt><dd>${status.base_url}</dd><dt>cluster port</dt><dd>${status.cluster_url}</dd><dt>cluster</dt><dd>${status.cluster.id}</dd></dl></section>` : null}
    <section class="card"><h3>Settings</h3><${Wrong} text=${error} />${found ? html`<${Table} caption="Settings" head=${["setting", "value", "from", "description"]}
      rows=${found.settings.map((one) => ({ key: one.key, cells: [html`<code>${one.key}</code>`, html`<code>${JSON.stringify(one.value)}</code>`, one.origin, html`<div class="note">${one.description}</div>`] }))} />` : null}</section>`;
}
