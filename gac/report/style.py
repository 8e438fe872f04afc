"""The page's style sheet: dark text on white, figures in one or two columns, a print version."""

CSS = """
:root { color-scheme: light; --ink: #1b1b1b; --soft: #555; --rule: #d9d9d9; --tint: #f6f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans",
  Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2.2rem 1.4rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .7rem; padding-top: 1.1rem;
  border-top: 1px solid var(--rule); }
p, dl { max-width: 76ch; }
.lead { font-size: 1.12rem; margin: 1.1rem 0 0; max-width: 76ch; }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 2rem; margin: .6rem 0 0; padding: 0;
  list-style: none; color: var(--soft); font-size: .92rem; }
.facts b { color: var(--ink); font-weight: 600; }
.note { color: var(--soft); font-size: .92rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .8rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule); }
thead th { font-weight: 600; vertical-align: bottom; border-bottom: 2px solid var(--ink);
  white-space: normal; min-width: 5.2rem; line-height: 1.25; }
th:first-child, td:first-child { text-align: left; padding-left: .2rem; }
tbody th { font-weight: 600; }
td.best { font-weight: 700; background: var(--tint); }
td .sd { color: var(--soft); font-weight: 400; }
.swatch { width: 46px; height: 14px; vertical-align: -2px; margin-right: .55rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr));
  gap: 1.6rem 1.8rem; }
figure { margin: 0; max-width: 640px; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .9rem; line-height: 1.45; margin-top: .3rem; }
dt { font-weight: 600; margin-top: .55rem; }
dd { margin: 0 0 0 1.2rem; }
.three { grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr));
  gap: 0 2.6rem; }
.scroll + .scroll { margin-top: 1.6rem; }
h3 { font-size: 1.02rem; margin: 1.2rem 0 0; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
code, pre { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: .86rem; }
pre { background: var(--tint); padding: .9rem 1.1rem; overflow-x: auto; line-height: 1.4; }
@media print {
  @page { size: A4; margin: 14mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .panels { grid-template-columns: 1fr 1fr; gap: 5mm; }
  .three { grid-template-columns: 1fr 1fr 1fr; }
  figure, tr, dt, dd { break-inside: avoid; }
  h2 { break-after: avoid; margin-top: 8mm; }
  table { font-size: 7.6pt; } th, td { padding: 1.2mm 1.4mm; } thead th { min-width: 0; }
  .two { grid-template-columns: 1fr 1fr; }
}
"""
