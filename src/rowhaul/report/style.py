"""The page's style: plain, for narrow and wide windows, light and dark."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5c6672; --line: #d9dee4; --paper: #ffffff;
  --card: #f5f7f9; --accent: #0072b2; --compute: #0072b2; --rows: #009e73; --dense: #e69f00; --plan: #cc79a7;
  --agree: #8a6fb0; --data: #56b4e9; --wait: #d55e00; --idle: #c3cad2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ed; --soft: #9aa5b1; --line: #343c46;
  --paper: #14181d; --card: #1d232a; --accent: #56b4e9; --idle: #4a5561; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 1.5rem 1rem 4rem; max-width: 72rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; } .note, footer { color: var(--soft); font-size: .9rem; }
.warning { border-left: 4px solid var(--wait); padding: .3rem .8rem; background: var(--card); }
.words { font-size: 1.05rem; } .words li { margin: .25rem 0; } .words ul { padding-left: 1.2rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem;
  margin: 1rem 0; }
.tiles div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.tiles b { display: block; font-size: 1.25rem; } .tiles span { color: var(--soft); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: .5rem; padding: .6rem; }
figcaption { font-weight: 600; font-size: .95rem; }
svg.plot { width: 100%; height: auto; display: block; color: var(--ink); }
.scroll { overflow-x: auto; } code { white-space: nowrap; font-size: .92em; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; }
th.text, td.text { text-align: left; } td.wrap { white-space: normal; min-width: 16rem; text-align: left; }
thead th { border-bottom: 1px solid var(--soft); } tbody tr:nth-child(even) { background: var(--card); }
td.bar { min-width: 7rem; }
td.bar i { display: block; height: .7rem; background: var(--accent); border-radius: 2px; }
details summary { cursor: pointer; color: var(--accent); }
svg.timeline { min-width: 46rem; width: 100%; height: auto; display: block; }
svg.timeline text { fill: var(--ink); font-size: 11px; } svg.timeline .rank { font-weight: 600; }
svg.timeline .lane, svg.timeline .tick { fill: var(--soft); } svg.timeline .lane { text-anchor: end; }
svg.timeline .tick { text-anchor: middle; } svg.timeline .grid { stroke: var(--line); }
svg.timeline .row { fill: var(--card); }
.compute { fill: var(--compute); background: var(--compute); }
.rows { fill: var(--rows); background: var(--rows); }
.dense { fill: var(--dense); background: var(--dense); } .plan { fill: var(--plan); background: var(--plan); }
.agree { fill: var(--agree); background: var(--agree); } .data { fill: var(--data); background: var(--data); }
.wait { fill: var(--wait); background: var(--wait); } .idle { fill: var(--idle); background: var(--idle); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .85rem; color: var(--soft); }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem; }
"""
