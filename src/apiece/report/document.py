"""An HTML page that needs nothing else: its frame, its style and its script."""

from __future__ import annotations

import base64
import hashlib
from html import escape


def document(heading: str, body: str) -> str:
    """A page that needs no other file, and may load none."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(heading)} · Apiece</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


STYLE = """
:root {
  --bg: #fcfcfb; --ink: #1b1f24; --soft: #5b6470; --rule: #e3e6e9; --grid: #eceef0; --shade: #f1f3f5;
  --note: #fff6e0; --edge: #d99a1c;
  --c0: #0072b2; --c1: #d55e00; --c2: #008f68; --c3: #b5478f; --c4: #a87900; --c5: #5546b5; --c6: #5c6670;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #14171b; --ink: #e9ecef; --soft: #a2abb5; --rule: #343a41; --grid: #282d34; --shade: #22272d;
    --note: #2e2818; --edge: #c99a3a;
    --c0: #5ab4ec; --c1: #ff8d47; --c2: #2fcaa0; --c3: #ea97cb; --c4: #e8bf4d; --c5: #a99dff; --c6: #b4bcc5;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--bg); color: var(--ink); overflow-wrap: break-word;
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 56px 40px 40px; }
.brand { margin: 0 0 28px; font-weight: 650; }
.brand span { color: var(--soft); font-weight: 400; }
h1 { font-size: clamp(30px, 5vw, 46px); line-height: 1.12; letter-spacing: -.022em; margin: 0 0 20px; }
h1, h3, .lead, .sub, .note, dd, li, summary, figcaption { overflow-wrap: anywhere; }
h2 { font-size: 24px; line-height: 1.25; letter-spacing: -.012em; margin: 0 0 6px; font-weight: 650; }
h3 { font-size: 15px; line-height: 1.4; margin: 0 0 8px; font-weight: 500; }
h3 b { font-weight: 650; }
h3 small { display: block; color: var(--soft); font-size: 13px; font-weight: 400; }
h3.block { font-size: 18px; font-weight: 650; margin-top: 32px; }
.lead { font-size: clamp(18px, 2.2vw, 21px); line-height: 1.5; max-width: 46em; margin: 0 0 12px; }
.sub { color: var(--soft); font-size: 17px; line-height: 1.55; max-width: 52em; margin: 0 0 12px; }
.note {
  background: var(--note); border-left: 3px solid var(--edge); border-radius: 0 8px 8px 0;
  padding: 10px 16px; margin: 14px 0; max-width: 56em; font-size: 15px;
}
.facts { display: flex; flex-wrap: wrap; gap: 14px 36px; margin: 28px 0 0; padding: 18px 0 0; }
.facts { border-top: 1px solid var(--rule); }
.facts dt { color: var(--soft); font-size: 13px; }
.facts dd { margin: 0; font-weight: 550; font-variant-numeric: tabular-nums; }
section { margin-top: 64px; }
.about { color: var(--soft); max-width: 52em; margin: 0 0 22px; font-size: 15px; }
.about i { color: var(--ink); font-style: normal; font-weight: 550; }
footer { margin-top: 72px; color: var(--soft); font-size: 14px; }

figure { margin: 0 0 32px; }
figcaption { font-size: 15px; margin-bottom: 10px; }
.panels { display: grid; gap: 28px 36px; }
.panel { min-width: 0; }
.two { grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
.many { grid-template-columns: repeat(auto-fill, minmax(min(100%, 280px), 1fr)); align-items: end; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 24px; margin: 0 0 18px; padding: 0; }
.legend { font-size: 15px; }
.swatch { flex: none; display: inline-block; vertical-align: -1px; margin-right: 8px; }
svg { display: block; overflow: visible; }
.panel svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.two svg text { font-size: 11px; }
.lines svg text { font-size: 14px; }
svg text.name, svg text.value { fill: var(--ink); font-size: 12px; }
svg path { fill: none; }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); } .s3 { --c: var(--c3); }
.s4 { --c: var(--c4); } .s5 { --c: var(--c5); } .s6 { --c: var(--c6); } .ink { --c: var(--soft); }
.grid { stroke: var(--grid); }
.line { stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.thick { stroke-width: 5; opacity: .35; }
.dashed { stroke-dasharray: 5 5; }
.dotted { stroke-dasharray: .1 5; stroke-width: 2.4; }
.other { stroke: var(--soft); opacity: .3; }
svg .band { fill: var(--c); opacity: .16; }
svg .mark { fill: var(--c); stroke: var(--bg); }
.full, .fill { fill: var(--c); }
.hollow { fill: var(--bg); stroke: var(--c); stroke-width: 2; }
.ink.hollow { stroke-width: 1.5; }
.whisker { stroke: var(--c); stroke-width: 1.5; }
.groove, svg .shade { fill: var(--shade); }
.diagonal { stroke: var(--soft); opacity: .6; }
.dots { stroke: var(--c); stroke-linecap: round; opacity: .72; }
.rings { stroke: var(--c); stroke-width: 1.5; }
.train, .test { fill: var(--soft); }
.test { opacity: .4; }
.tip { fill: var(--soft); fill-opacity: 0; }
.tip:hover { fill-opacity: .12; }

.scroll { overflow-x: auto; margin: 0 -12px; padding: 0 12px; }
:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
table { border-collapse: collapse; font-size: 15px; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: 9px 8px; text-align: right; white-space: nowrap; font-weight: 400; vertical-align: top; }
th, td { border-bottom: 1px solid var(--rule); }
thead th, thead td { border-bottom: 0; color: var(--soft); padding-bottom: 2px; font-size: 13px; }
thead tr:first-child th { color: var(--ink); font-weight: 600; padding-left: 24px; text-align: center; }
thead span { display: block; border-bottom: 1px solid var(--rule); padding-bottom: 4px; }
thead tr:last-child th { border-bottom: 1px solid var(--soft); padding-bottom: 8px; }
tr > :first-child { text-align: left; padding-left: 0; position: sticky; left: 0; background: var(--bg); }
tbody th { font-weight: 600; white-space: normal; }
tbody th .name { display: flex; align-items: baseline; width: max-content; max-width: 168px; }
tbody th .name span { overflow-wrap: anywhere; }
tbody tr:hover > * { background: var(--shade); }
.first { padding-left: 24px; }
tbody small { display: block; color: var(--soft); font-size: 12.5px; font-weight: 400; line-height: 1.3; }
th[aria-sort]::after { content: " ↓"; }
th[aria-sort=ascending]::after { content: " ↑"; }
.sortable thead tr:last-child th { cursor: pointer; }
.tag {
  background: var(--note); border: 1px solid var(--edge); border-radius: 10px; padding: 1px 8px;
  font-size: 12px; font-weight: 400; white-space: nowrap;
}
details { border-top: 1px solid var(--rule); padding: 12px 0; }
details:last-of-type { border-bottom: 1px solid var(--rule); }
summary { cursor: pointer; }
summary span, details p, details li { color: var(--soft); font-size: 15px; }
pre, code { font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--shade); padding: 14px 16px; border-radius: 8px; overflow-x: auto; margin: 8px 0; }

@media (max-width: 600px) {
  main { padding: 32px 20px 28px; }
  section { margin-top: 48px; }
  .facts { gap: 12px 28px; }
  .two svg text, svg text.name, svg text.value { font-size: 13.5px; }
  .scroll { margin: 0 -20px; padding: 0 20px; }
  tr > :first-child { left: -20px; padding-left: 20px; }
  tbody th .name { max-width: 150px; }
}
@media print { .scroll { overflow: visible; } .panel, tr { break-inside: avoid; } }
"""

SCRIPT = """
document.querySelectorAll("table").forEach(function (table) {
  var body = table.tBodies[0], heads = Array.from(table.tHead.rows[1].cells);
  if (body.rows.length < 2) return;
  table.classList.add("sortable");
  function value(row, column) {
    var text = row.cells[column].getAttribute("data-v");
    return text === null || column === 0 ? text : Number(text);
  }
  function sort(head, column) {
    var state = head.getAttribute("aria-sort"), down = state ? state === "ascending" : column > 0;
    heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    Array.from(body.rows).sort(function (a, b) {
      var x = value(a, column), y = value(b, column);
      if (x === null || y === null) return (x === null) - (y === null);
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    }).forEach(function (row) { body.appendChild(row); });
  }
  heads.forEach(function (head, column) {
    head.tabIndex = 0;
    head.addEventListener("click", function () { sort(head, column); });
    head.addEventListener("keydown", function (event) {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      sort(head, column);
    });
  });
});
"""
