// Markdown of answers as elements. Text of a model is only ever a text node or the address of a link whose scheme is
// checked. No code here writes markup, and therefore nothing has to be escaped.
//
// Bounded: recursion by MAX_DEPTH, length by MAX_TEXT, and no marker is searched for twice in the same text. Expressions
// that could try the same characters again and again see MAX_ROW of them at most.
import { h, html } from "/ui/vendor/preact.js";
import { Copy } from "/ui/shared.js";

const MAX_DEPTH = 6;
const MAX_TEXT = 100000;
const MAX_ROW = 1000;
const MAX_ADDRESS = 2000;
const SCHEMES = ["http:", "https:", "mailto:"];
const PAIRS = [["***", "strong"], ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const WORD = /[\p{L}\p{N}]/u;

// The address of a link, or null where it is none that may be opened.
function address(text) {
  try {
    const url = new URL(text.trim());
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const Link = ({ to, children }) => html`<a href=${to} title=${to} target="_blank" rel="noopener noreferrer nofollow">${children}</a>`;

// Emphasis, code, links and addresses within one line or paragraph.
export function inline(text, depth = 0) {
  const found = [];
  const missing = new Set();
  let plain = "", at = 0;
  const flush = () => {
    if (plain) found.push(plain);
    plain = "";
  };
  const next = new Map();
  const search = (marker, from) => {
    const known = next.get(marker);
    if (known === undefined || (known >= 0 && known < from)) next.set(marker, text.indexOf(marker, from));
    return next.get(marker);
  };
  // The end of an emphasis: its marker after something that is no space, and no part of a longer run.
  const closing = (marker, from) => {
    if (missing.has(marker)) return -1;
    for (let end = text.indexOf(marker, from); end >= 0; end = text.indexOf(marker, end + 1)) {
      const after = text[end + marker.length] ?? "";
      if (!/\s/.test(text[end - 1]) && !(marker.length === 1 && after === marker) && !(marker[0] === "_" && WORD.test(after))) return end;
      if (marker.length === 1 && after === marker) end += 1;
    }
    missing.add(marker);
    return -1;
  };
  const take = () => {
    const rest = text[at];
    if (rest === "\\" && at + 1 < text.length && /[!-/:-@[-`{-~]/.test(text[at + 1])) {
      plain += text[at + 1];
      return at + 2;
    }
    if (rest === "`") {
      const ticks = /^`+/.exec(text.slice(at, at + 8))[0];
      const end = search(ticks, at + ticks.length);
      if (end < 0) { plain += ticks; return at + ticks.length; }
      flush();
      found.push(h("code", null, text.slice(at + ticks.length, end).trim()));
      return end + ticks.length;
    }
    if (depth >= MAX_DEPTH) return -1;
    if (rest === "[" || (rest === "!" && text[at + 1] === "[")) {
      const from = at + (rest === "!" ? 2 : 1);
      const middle = search("](", from);
      const nearest = middle >= 0 && text.lastIndexOf("[", middle) === from - 1;
      const end = nearest ? search(")", middle) : -1;
      const to = end < 0 || end - middle > MAX_ADDRESS ? null : address(text.slice(middle + 2, end).split(" ")[0]);
      if (to !== null) {
        flush();
        found.push(html`<${Link} to=${to}>${inline(text.slice(from, middle), depth + 1)}<//>`);
        return end + 1;
      }
    }
    if (rest === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !WORD.test(text[at - 1] ?? "")) {
      const bare = /^[^\s<>"'`]+/.exec(text.slice(at, at + MAX_ADDRESS))[0].replace(/[.,;:!?)\]}*_~]+$/, "");
      const to = address(bare);
      if (to !== null) {
        flush();
        found.push(html`<${Link} to=${to}>${bare}<//>`);
        return at + bare.length;
      }
    }
    for (const [marker, tag] of PAIRS) {
      if (!text.startsWith(marker, at) || /\s|^$/.test(text[at + marker.length] ?? "")) continue;
      if (marker[0] === "_" && WORD.test(text[at - 1] ?? "")) continue;
      const end = closing(marker, at + marker.length + 1);
      if (end < 0) continue;
      flush();
      found.push(h(tag, null, inline(text.slice(at + marker.length, end), depth + 1)));
      return end + marker.length;
    }
    return -1;
  };
  while (at < text.length) {
    const then = take();
    if (then < 0) plain += text[at];
    at = then < 0 ? at + 1 : then;
  }
  flush();
  return found;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]{0,40})[^`]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const cells = (row) => row.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const DIVIDER = /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?\|? *$/;
// These three could try the same characters again and again: a row that is longer is none of them.
const test = (expression, row) => row.length <= MAX_ROW && expression.test(row);
const begins = (row) => test(FENCE, row) || test(RULE, row) || ITEM.test(row) || /^ {0,3}(#{1,6} |>)/.test(row);

function Code({ language, text }) {
  return html`<div class="code"><div class="row spread tiny quiet"><span>${language || "text"}</span><${Copy} text=${text} label="Copy code" /></div>
    <pre tabindex="0"><code>${text}</code></pre></div>`;
}

// The items of a list: rows that are indented more than its marker belong to the item above them.
function list(rows, from, depth) {
  const [, indent, marker] = ITEM.exec(rows[from]);
  const ordered = /\d/.test(marker), items = [];
  let at = from;
  while (at < rows.length) {
    const item = ITEM.exec(rows[at]);
    const belongs = item && item[1].length <= indent.length + 1 && /\d/.test(item[2]) === ordered && !test(RULE, rows[at]);
    if (belongs) items.push([item[4]]);
    else if (rows[at].trim() && !/^ /.test(rows[at]) && (begins(rows[at]) || !rows[at - 1].trim())) break;
    else items.at(-1).push(rows[at].replace(new RegExp(`^ {0,${indent.length + marker.length + 1}}`), ""));
    at += 1;
  }
  const start = ordered ? Number.parseInt(marker, 10) : undefined;
  return [h(ordered ? "ol" : "ul", start > 1 ? { start } : null, items.map((lines) => h("li", null, tight(blocks(lines, depth + 1))))), at];
}

// A list item of one paragraph needs none around its text.
const tight = (made) => made[0]?.type === "p" ? [made[0].props.children, ...made.slice(1)] : made;

function blocks(rows, depth) {
  const made = [];
  let at = 0;
  while (at < rows.length) {
    const row = rows[at];
    const fence = test(FENCE, row) ? FENCE.exec(row) : null, heading = /^ {0,3}(#{1,6}) +(.*)$/.exec(row);
    if (!row.trim()) {
      at += 1;
    } else if (fence) {
      const end = rows.findIndex((one, index) => index > at && one.trim().startsWith(fence[1]) && !one.trim().slice(fence[1].length).trim());
      const last = end < 0 ? rows.length : end;
      made.push(html`<${Code} language=${fence[2]} text=${rows.slice(at + 1, last).join("\n")} />`);
      at = last + 1;
    } else if (heading) {
      made.push(h(`h${Math.min(6, heading[1].length + 2)}`, null, inline(heading[2].trimEnd().replace(/ #+$/, ""))));
      at += 1;
    } else if (test(RULE, row)) {
      made.push(h("hr"));
      at += 1;
    } else if (/^ {0,3}>/.test(row) && depth < MAX_DEPTH) {
      const from = at;
      while (at < rows.length && /^ {0,3}>/.test(rows[at])) at += 1;
      made.push(h("blockquote", null, blocks(rows.slice(from, at).map((one) => one.replace(/^ {0,3}> ?/, "")), depth + 1)));
    } else if (ITEM.test(row) && depth < MAX_DEPTH) {
      const [items, next] = list(rows, at, depth);
      made.push(items);
      at = next;
    } else if (row.includes("|") && test(DIVIDER, rows[at + 1] ?? "")) {
      const head = cells(row), body = [];
      at += 2;
      while (at < rows.length && rows[at].includes("|")) { body.push(cells(rows[at])); at += 1; }
      made.push(html`<div class="scroll" tabindex="0" role="region" aria-label="Table"><table><thead><tr>${head.map((cell) => html`<th scope="col">${inline(cell)}</th>`)}</tr></thead>
        <tbody>${body.map((one) => html`<tr>${one.slice(0, head.length).map((cell) => html`<td>${inline(cell)}</td>`)}</tr>`)}</tbody></table></div>`);
    } else {
      const from = at;
      at += 1;
      while (at < rows.length && rows[at].trim() && !begins(rows[at])) at += 1;
      made.push(h("p", null, inline(rows.slice(from, at).join("\n"))));
    }
  }
  return made;
}

export function markdown(text) {
  return text.length > MAX_TEXT ? [h("p", null, text)] : blocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
}
