"""One figure or table of a paper, redone: tables, the paper's statements beside ours, a judgement."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from figures.published import Stated
from figures.reasons import JUDGEMENTS

Show = Callable[[float], str]


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; the first column is text, the others are numbers or all text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    all_text: bool = False

    def markdown(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in [self.columns, *self.rows]]
        lines.insert(1, "|---|" + ("---|" if self.all_text else "---:|") * (len(self.columns) - 1))
        return "\n".join(lines)


@dataclass
class Section:
    """A figure or table of a paper."""

    key: str  # also the name of its plots
    title: str
    setting: str
    tables: list[Table] = field(default_factory=list)
    statements: list[tuple[Stated, str]] = field(default_factory=list)  # the paper's, and what came out here
    plots: list[str] = field(default_factory=list)  # file names

    def markdown(self) -> str:
        parts = [f"## {self.title}", self.setting, *(table.markdown() for table in self.tables)]
        if self.statements:
            rows = [[stated.text, stated.place, here] for stated, here in self.statements]
            parts.append(Table(["the paper says", "where", "here"], rows, all_text=True).markdown())
        parts.append(f"**Reproduced: {JUDGEMENTS[self.key].verdict}.** {JUDGEMENTS[self.key].why}")
        parts.extend(f"![{self.title}]({name})" for name in self.plots)
        return "\n\n".join(parts)

    def keep(self, folder: Path) -> None:
        """Write what was measured, so that a judgement can change without another run."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.key}.json").write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def kept(cls, path: Path) -> Section:
        """Read what `keep` wrote."""
        fields = json.loads(path.read_text())
        tables = [Table(**table) for table in fields.pop("tables")]
        statements = [(Stated(**stated), here) for stated, here in fields.pop("statements")]
        return cls(**fields, tables=tables, statements=statements)


def percent(share: float, digits: int = 1) -> str:
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"  # + 0.0: no minus before a zero


def milliseconds(seconds: float) -> str:
    """With about three digits."""
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def span(values: Sequence[float], show: Show = percent) -> str:
    """Lowest and highest of some values."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"
