// Small charts in plain SVG. A value that is null is a gap.
import { html, useMemo, useState } from "/ui/vendor/preact.js";

const WIDTH = 360, HEIGHT = 60;
// Points that the width of a chart may stand for: 10 minutes, half an hour, an hour.
const SPANS = [60, 180, 360];

// The path of a line with its gaps; a value between two gaps is a short stroke, so that it can be seen.
function line(values, highest, span) {
  const offset = span - values.length;
  let path = "", drawing = false;
  values.forEach((value, at) => {
    if (value === null) { drawing = false; return; }
    const y = (HEIGHT - (value / highest) * (HEIGHT - 2)).toFixed(1);
    path += drawing ? `L${offset + at} ${y}` : `M${offset + at - 0.5} ${y}L${offset + at} ${y}`;
    drawing = true;
  });
  return path;
}

const clock = (unix) => new Date(unix * 1000).toLocaleTimeString();

// Lines over the last hour: `series` is a list of { name, kind, values }, `at` the Unix seconds of the last value,
// `interval` the seconds between two values, `shown` turns a value into text, `top` is the minimum of the vertical axis maximum.
export function Chart({ title, series, at, interval, shown, top = 0 }) {
  const [picked, setPicked] = useState(null);
  const length = series[0].values.length;
  const span = SPANS.find((one) => length <= one) ?? SPANS.at(-1);
  const drawn = useMemo(() => {
    const known = series.flatMap(({ values }) => values.filter((value) => value !== null));
    const highest = Math.max(...known, 0);
    return { highest, empty: !known.length, lines: series.map((one) => ({ ...one, path: line(one.values, Math.max(highest, top) || 1, span) })) };
  }, [at, top, length]);
  const index = picked === null ? length - 1 : Math.max(0, Math.min(length - 1, picked - (span - length)));
  const point = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    setPicked(Math.round(((event.clientX - box.left) / box.width) * span));
  };
  const values = series.map((one) => `${series.length > 1 ? `${one.name} ` : ""}${one.values[index] === null || one.values[index] === undefined ? "–" : shown(one.values[index])}`).join(", ");
  const highest = drawn.empty ? "no data yet" : top ? `of ${shown(top)}` : `highest ${shown(drawn.highest)}`;
  const minutes = Math.round((span * interval) / 60);
  return html`<figure class="chart"><figcaption class="small">${title}<b>${values}</b></figcaption>
    <svg viewBox=${`0 0 ${span} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${title} in the last ${minutes} minutes: now ${values}; highest ${shown(drawn.highest)}`}
      onPointerMove=${point} onPointerLeave=${() => setPicked(null)}>
      ${drawn.lines.map(({ kind, path }) => html`<path class=${kind} d=${path} />`)}
      ${picked === null ? null : html`<path class="cursor" d=${`M${span - length + index} 0V${HEIGHT}`} />`}</svg>
    <p class="tiny quiet row spread"><span>${highest}</span><span>${picked === null ? `${minutes} min` : clock(at - (length - 1 - index) * interval)}</span></p></figure>`;
}

// One bar for each label, of `parts` { name, kind, values } that stand on each other.
export function Bars({ title, labels, parts, shown }) {
  const totals = labels.map((_, at) => parts.reduce((sum, one) => sum + one.values[at], 0));
  const highest = Math.max(...totals, 1);
  const step = WIDTH / labels.length;
  const [picked, setPicked] = useState(labels.length - 1);
  const at = Math.min(picked, labels.length - 1);
  const stacks = labels.map((_, bar) => {
    let below = HEIGHT;
    return parts.map(({ kind, values }) => {
      const height = (values[bar] / highest) * (HEIGHT - 2);
      below -= height;
      return html`<rect class=${kind} x=${bar * step + step * 0.1} y=${below} width=${step * 0.8} height=${height} />`;
    });
  });
  const point = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    setPicked(Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * labels.length)));
  };
  return html`<figure class="chart tall"><figcaption class="small">${title}
      <b>${labels[at]}: ${parts.map((one) => `${one.name} ${shown(one.values[at])}`).join(", ")}</b></figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" onPointerMove=${point}
      aria-label=${`${title}: ${labels.map((label, bar) => `${label} ${shown(totals[bar])}`).join(", ")}`}>${stacks}</svg>
    <p class="tiny quiet row spread"><span>${labels[0]}</span><span>highest ${shown(highest)}</span><span>${labels.at(-1)}</span></p></figure>`;
}
