"""The page of `rowhaul serve --page`: how fresh and how good the served model is, and how fast it answers.

It needs nothing from the internet. Its script asks ``stats`` every two seconds and draws what it has heard.
"""

from __future__ import annotations

from html import escape

from rowhaul._page import page
from rowhaul.serve.traffic import EVERY_SECONDS, KEPT_SECONDS

_STYLE = """
a { color: var(--accent); }
header { display: flex; flex-wrap: wrap; gap: .2rem 1rem; align-items: baseline; }
header h1 { margin: 0; } #state { margin-left: auto; }
#state::before { content: "●"; color: #009e73; margin-right: .4rem; }
#state.lost::before { color: #d55e00; }
.grid { display: grid; gap: .8rem; margin: .8rem 0; grid-template-columns: repeat(3, minmax(0, 1fr)); }
.tile, figure { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
.tile { padding: .7rem .9rem; }
.tile .name, .tile .more, figcaption { color: var(--soft); font-size: .85rem; }
.tile .value { font-size: 1.75rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.charts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
figure { margin: 0; padding: .6rem .8rem .3rem; } figcaption { display: flex; gap: .6rem; flex-wrap: wrap; }
figcaption b { color: var(--ink); font-weight: 600; } figcaption .at { margin-left: auto; }
figcaption i { width: .7rem; height: .7rem; border-radius: .15rem; display: inline-block;
  margin-right: .3rem; }
figure svg { display: block; width: 100%; height: 11rem; } figure text { fill: var(--soft); font-size: 11px; }
.rule { stroke: var(--line); } .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.none { text-anchor: middle; }
@media (max-width: 44rem) { .grid { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .5rem; }
  .charts { grid-template-columns: minmax(0, 1fr); } .tile .value { font-size: 1.4rem; }
  #state { margin-left: 0; } figure svg { height: 9rem; } }
"""
_SCRIPT = r"""
const BLUE = "var(--accent)", ORANGE = "#e69f00", samples = new Map();
const byId = id => document.getElementById(id);
let last = null, heard = 0;
const number = (value, digits = 0) => value == null ? "–" :
  value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const rate = value => value == null ? "–" : number(value, value < 10 ? 1 : 0);
const short = value => number(value, value < 10 ? 1 : 0);
const time = value => value == null ? "–" : short(value) + " ms";
function span(seconds) {
  if (seconds == null) return "–";
  if (seconds < 100) return number(Math.max(seconds, 0), seconds < 10 ? 1 : 0) + " s";
  if (seconds < 6000) return number(seconds / 60) + " min";
  return seconds < 172800 ? number(seconds / 3600) + " h" : number(seconds / 86400) + " days";
}
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"]; let unit = 0;
  while (value >= 1024 && unit < 4) { value /= 1024; unit++; }
  return number(value, value < 10 && unit ? 1 : 0) + " " + units[unit];
}
function tile(id, value, more) { byId(id).textContent = value; byId(id + "-more").textContent = more; }
function ticks(low, high) {
  const rough = (high - low) / 3 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(one => one * power).find(one => one >= rough - 1e-12), found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step)
    found.push(Math.abs(at) < step / 2 ? 0 : at);
  return {found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9))};
}
function draw(id, lines, {now, length, fromZero, unit}) {
  const box = byId(id), wide = box.clientWidth || 400, high = box.clientHeight || 170;
  const left = 46, right = 8, top = 8, bottom = 20, all = lines.flatMap(one => one.points.map(two => two[1]));
  const out = [];
  if (!all.length) {
    out.push(`<text class="none" x="${wide / 2}" y="${high / 2}">${byId(id).dataset.none}</text>`);
  } else {
    let low = Math.min(...all), up = Math.max(...all);
    if (fromZero) low = 0;
    if (up - low < 1e-9) { up += Math.abs(up) * .05 || 1; if (!fromZero) low -= Math.abs(low) * .05; }
    const room = (up - low) * .06; up += room; if (!fromZero) low -= room;
    const x = at => left + (wide - left - right) * (1 - (now - at) / length);
    const y = value => top + (high - top - bottom) * (1 - (value - low) / (up - low));
    const {found, digits} = ticks(low, up);
    for (const at of found) {
      out.push(`<line class="rule" x1="${left}" x2="${wide - right}" y1="${y(at)}" y2="${y(at)}"/>`);
      out.push(`<text x="${left - 6}" y="${y(at) + 4}" text-anchor="end">${number(at, digits)}</text>`);
    }
    const every = [15, 30, 60, 120, 300].find(one => length / one <= 6);
    for (let back = 0; back <= length; back += every) {
      const label = back ? "−" + (back % 60 ? back + " s" : back / 60 + " min") : "now";
      const anchor = back ? "middle" : "end";
      const where = back ? x(now - back) : wide - right;
      if (where > left + 10)
        out.push(`<text x="${where}" y="${high - 5}" text-anchor="${anchor}">${label}</text>`);
    }
    for (const one of lines) {
      const path = one.points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
      out.push(`<polyline class="line" style="stroke: ${one.colour}" points="${path.join(" ")}"/>`);
      if (path.length) {
        const [cx, cy] = path[path.length - 1].split(",");
        out.push(`<circle cx="${cx}" cy="${cy}" r="3" style="fill: ${one.colour}"/>`);
      }
    }
  }
  box.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  box.innerHTML = out.join("");
  box.onpointermove = event => {
    const at = now - length * (1 - (event.offsetX - left) / (wide - left - right));
    const near = lines.map(one => one.points.reduce((best, two) =>
      !best || Math.abs(two[0] - at) < Math.abs(best[0] - at) ? two : best, null)).filter(Boolean);
    byId(id + "-at").textContent = near.length ?
      span(now - near[0][0]) + " ago: " + near.map(one => unit(one[1])).join(" / ") : "";
  };
  box.onpointerleave = () => { byId(id + "-at").textContent = ""; };
}
function show() {
  if (!last) return;
  const now = last.now + (performance.now() - heard) / 1000, list = [...samples.values()];
  list.sort((one, two) => one.time - two.time);
  const newest = list[list.length - 1] || {};
  const windows = last.windows.filter(one => one.auc != null), window_ = windows[windows.length - 1];
  const age = last.newest_event == null ? null : now - last.newest_event;
  tile("fresh", span(age), age == null ? "not known" : "since the newest event it has learned");
  tile("auc", window_ ? number(window_.auc, 4) : "–", window_ ?
    `${number(window_.num_samples)} samples before learning; calibration ${number(window_.calibration, 2)}` :
    "no run publishes here");
  tile("requests", rate(newest.requests_per_second),
    `${rate(newest.candidates_per_second)} candidates/s` +
    (newest.errors_per_second ? `, ${rate(newest.errors_per_second)} errors/s` : ""));
  tile("times", `${short(newest.p50_ms)} / ${time(newest.p99_ms)}`, `in ${last.processes} process` +
    (last.processes == 1 ? "" : "es"));
  tile("rows", number(last.rows), last.changed_rows ? number(last.changed_rows) + " changed since the base" :
    bytes(last.row_bytes) + " mapped");
  const ago = last.published_at == null ? "" : `, published ${span(now - last.published_at)} ago`;
  tile("deltas", number(last.deltas), `step ${number(last.step)}${ago}`);
  const oldest = Math.min(newest.time || now, ...list.map(one => one.time), ...windows.map(one => one.time));
  const length = Math.min(KEPT, Math.max(60, now - oldest)), begin = now - length;
  const points = name => list.filter(one => one[name] != null && one.time >= begin)
    .map(one => [one.time, one[name]]);
  const shown = {now, length, fromZero: true, unit: value => number(value, 1)};
  draw("auc-chart", [{colour: BLUE, points: windows.filter(one => one.time >= begin)
    .map(one => [one.time, one.auc])}], {...shown, fromZero: false, unit: value => number(value, 4)});
  draw("fresh-chart", [{colour: BLUE, points: points("age_seconds")}], {...shown, unit: span});
  draw("requests-chart", [{colour: BLUE, points: points("requests_per_second")}], shown);
  draw("times-chart", [{colour: BLUE, points: points("p50_ms")}, {colour: ORANGE, points: points("p99_ms")}],
    {...shown, unit: time});
}
async function poll() {
  try {
    const newest = Math.max(0, ...samples.keys());
    const answer = await fetch(`stats?since=${newest}`, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    last = await answer.json(); heard = performance.now();
    for (const one of last.samples) samples.set(one.time, one);
    for (const at of samples.keys()) if (at < last.now - KEPT) samples.delete(at);
    byId("state").textContent = "live"; byId("state").className = "note";
    document.body.dataset.polls = Number(document.body.dataset.polls || 0) + 1;
    show();
  } catch (error) {
    byId("state").textContent = "the server does not answer; trying again";
    byId("state").className = "note lost";
  }
  setTimeout(poll, EVERY);
}
addEventListener("resize", show);
poll();
"""
_TILES = (
    ("fresh", "Freshness"),
    ("auc", "AUC"),
    ("requests", "Requests a second"),
    ("times", "p50 / p99"),
    ("rows", "Rows"),
    ("deltas", "Deltas applied"),
)
_TIMES = (("var(--accent)", "p50"), ("#e69f00", "p99"))
_CHARTS = (
    ("auc-chart", "AUC, before learning", "a window of samples has to end first", ()),
    ("fresh-chart", "Age of the newest learned event, s", "no run publishes here", ()),
    ("requests-chart", "Requests a second", "no requests yet", ()),
    (
        "times-chart",
        "Time of a request, ms",
        "no requests yet",
        (("var(--accent)", "p50"), ("#e69f00", "p99")),
    ),
)


def live_page(model: str) -> str:
    """Return the page as HTML."""
    tiles = "".join(
        f'<div class="tile"><div class="name">{name}</div><div class="value" id="{one}">–</div>'
        f'<div class="more" id="{one}-more"></div></div>'
        for one, name in _TILES
    )
    charts = "".join(
        f"<figure><figcaption><b>{title}</b>"
        + "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for colour, name in legend)
        + f'<span class="at" id="{one}-at"></span></figcaption>'
        f'<svg id="{one}" role="img" aria-label="{title}" data-none="{none}"></svg></figure>'
        for one, title, none, legend in _CHARTS
    )
    body = [
        f'<header><h1>Rowhaul live</h1><span class="note">{escape(model)}</span>'
        '<span class="note" id="state">connecting</span></header>',
        f'<div class="grid">{tiles}</div><div class="grid charts">{charts}</div>',
        '<footer><a href="docs">/docs</a> · <a href="metrics">/metrics</a> · <a href="stats">/stats</a> · '
        "all processes of this server together; rates and times over the last ten seconds</footer>",
        f"<script>const EVERY = {1000 * EVERY_SECONDS}, KEPT = {KEPT_SECONDS};{_SCRIPT}</script>",
    ]
    return page("Rowhaul: live", body, _STYLE)
