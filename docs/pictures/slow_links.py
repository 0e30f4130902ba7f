"""Draws slow-links.svg, the landing page's plot, from the table of docs/performance.md."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

BARS = {  # milliseconds a step; "Peers on slow links", 4 x 100 Mbit/s
    "one machine, Rowhaul": 62,
    "one machine, plain PyTorch": 112,
    "four machines, Rowhaul": 185,
    "four machines, TorchRec's best": 578,
    "four machines, DDP": 717,
}

figure = Figure(figsize=(4.8, 2.4), layout="constrained")
axis = figure.subplots()
colours = ["#0072b2" if "Rowhaul" in name else "#9aa5b1" for name in BARS]
bars = axis.barh(list(BARS), list(BARS.values()), color=colours, height=0.7)
axis.bar_label(bars, padding=3, fontsize=9)
axis.invert_yaxis()
axis.set_xlim(0, 880)
figure.suptitle("milliseconds a step, links of 100 Mbit/s; less is better", fontsize=9)
axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
axis.tick_params(length=0, labelsize=9)
axis.set_xticks([])
with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "slow links"}):
    figure.savefig(Path(__file__).parent / "slow-links.svg", metadata={"Date": None}, transparent=True)
