"""Style and script of the HTML page. Nothing here depends on a plan, and nothing is loaded from anywhere."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1c2024; --dim: #646b73; --line: #dfe3e8; --card: #f6f7f9;
        --work: 52%; --move: 78%; --ink: #ffffff; }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) {
  --bg: #16191d; --fg: #e4e7eb; --dim: #98a1ab; --line: #2d333b; --card: #1e2228; --work: 48%; --move: 30%; } }
:root[data-theme=dark] {
  --bg: #16191d; --fg: #e4e7eb; --dim: #98a1ab; --line: #2d333b; --card: #1e2228; --work: 48%; --move: 30%;
  color-scheme: dark; }
:root[data-theme=light] { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--bg); color: var(--fg);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
header { display: flex; justify-content: space-between; align-items: baseline; gap: 1rem; }
button, input, select { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
       border-radius: 6px; padding: .3rem .6rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; background: var(--card);
     border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; }
dt, small, .dim { color: var(--dim); } dd { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; border-bottom: 2px solid var(--line); }
th, td { padding: .35rem .6rem; vertical-align: top; } td { border-bottom: 1px solid var(--line); }
.n { text-align: right; white-space: nowrap; }
th.sort { cursor: pointer; user-select: none; } th[data-way="1"]::after { content: " ↑"; }
th[data-way="-1"]::after { content: " ↓"; }
.chip { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .4em;
        background: hsl(var(--h) 55% var(--work)); }
.ops { overflow-wrap: anywhere; }
.tools { display: flex; gap: .6rem; align-items: center; margin: .5rem 0; flex-wrap: wrap; }
.tools input { flex: 1 1 16rem; max-width: 28rem; }
svg.timeline { width: 100%; height: auto; background: var(--card); border: 1px solid var(--line);
               border-radius: 8px; padding: 8px; }
svg text { fill: var(--fg); font: 11px system-ui, sans-serif; } svg text.axis { fill: var(--dim); text-anchor: middle; }
svg text.number { fill: var(--ink); text-anchor: middle; pointer-events: none; }
svg line.grid { stroke: var(--line); }
svg rect.work { fill: hsl(var(--h) 55% var(--work)); } svg rect.move { fill: hsl(var(--h) 45% var(--move)); }
""".strip()

SCRIPT = """
"use strict";
const root = document.documentElement, body = document.querySelector("#kernels tbody");
document.querySelector("#theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark"
                                  : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const rows = Array.from(body.rows), find = document.querySelector("#find"), stage = document.querySelector("#stage");
function show() {
  const words = find.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let seen = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    const fits = (stage.value === "" || row.dataset.stage === stage.value) && words.every(w => text.includes(w));
    row.hidden = !fits;
    seen += fits ? 1 : 0;
  }
  document.querySelector("#seen").textContent = seen + " of " + rows.length;
}
find.addEventListener("input", show);
stage.addEventListener("change", show);
for (const head of document.querySelectorAll("#kernels th.sort")) {
  head.addEventListener("click", () => {
    const way = head.dataset.way === "-1" ? 1 : -1, at = head.cellIndex;
    for (const other of head.parentNode.cells) delete other.dataset.way;
    head.dataset.way = way;
    const value = row => row.cells[at].dataset.v === undefined ? row.cells[at].textContent : +row.cells[at].dataset.v;
    rows.sort((a, b) => { const x = value(a), y = value(b); return way * (x < y ? -1 : x > y ? 1 : 0); });
    body.append(...rows);
  });
}
show();
""".strip()
