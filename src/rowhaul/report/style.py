"""What the page of a run adds to the common style: tiles, plots side by side, bars, the timeline."""

STYLE = """
:root { --compute: #0072b2; --rows: #009e73; --dense: #e69f00; --plan: #cc79a7; --agree: #8a6fb0;
  --data: #56b4e9; --wait: #d55e00; --idle: #c3cad2; }
@media (prefers-color-scheme: dark) { :root { --idle: #4a5561; } }
.warning { border-left: 4px solid var(--wait); padding: .3rem .8rem; background: var(--card); }
.words { font-size: 1.05rem; } .words li { margin: .25rem 0; } .words ul { padding-left: 1.2rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem;
  margin: 1rem 0; }
.tiles div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.tiles b { display: block; font-size: 1.25rem; } .tiles span { color: var(--soft); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: .5rem; padding: .6rem; }
figure svg.plot { min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; }
code { white-space: nowrap; font-size: .92em; }
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
