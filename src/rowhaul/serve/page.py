"""The page at /docs, which needs nothing from the internet, and what /openapi.json says of a request."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from rowhaul._id_kinds import HEX, TEXT
from rowhaul._page import page
from rowhaul.data.schema import Schema
from rowhaul.serve.folder import ServedFolder
from rowhaul.serve.settings import ServeSettings

_STYLE = """
pre, textarea { background: var(--card); border: 1px solid var(--line); padding: .7rem; overflow-x: auto;
  font: .85rem/1.4 ui-monospace, monospace; color: var(--ink); width: 100%; }
button { font: inherit; padding: .3rem 1rem; }
"""
_SCRIPT = """
document.getElementById("send").onclick = async () => {
  const began = performance.now(), out = document.getElementById("answer");
  try {
    const answer = await fetch("score", {method: "POST", headers: {"Content-Type": "application/json"},
                                         body: document.getElementById("body").value});
    const text = await answer.text();
    out.textContent = answer.status + " in " + (performance.now() - began).toFixed(1) + " ms\\n" + text;
  } catch (error) { out.textContent = error; }
};
"""


def example_request(schema: Schema, key_kinds: dict[str, str]) -> dict[str, Any]:
    """Return a request of two candidates that has every column; the first id is shared."""
    ids = {name: _example_id(key_kinds.get(name)) for name in schema.features}
    first = list(ids)[:1] if len(ids) > 1 else []
    one = {name: value for name, value in ids.items() if name not in first}
    one |= {column.name: 1.5 for column in schema.dense}
    return {"shared": {name: ids[name] for name in first}, "candidates": [one, one]}


def _example_id(kind: str | None) -> Any:
    return {TEXT: "some id", HEX: "1f"}.get(kind or "", 7)


def _kind_text(kind: str | None) -> str:
    texts = {TEXT: "string", HEX: "hexadecimal string or integer", None: "integer or string"}
    return texts.get(kind, "integer") + ", a list of those, or null"


def docs_page(folder: ServedFolder, settings: ServeSettings) -> str:
    """Return the page as HTML."""
    kinds = folder.key_kinds
    rows = [(name, "id", _kind_text(kinds.get(name))) for name in folder.schema.features]
    rows += [(one.name, "number", "number or null") for one in folder.schema.dense]
    lines = "".join(
        f"<tr>{''.join(f'<td class=text>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    example = json.dumps(example_request(folder.schema, kinds), indent=1)
    body = [
        "<h1>Scores over HTTP</h1>",
        f"<p>Model {escape(folder.model)}, trained for {folder.step:,} steps.</p>",
        "<p><b>POST /score</b> takes JSON: <code>shared</code>, features that all candidates share, and "
        "<code>candidates</code>, a mapping for each or a list for each feature. Every column below is in "
        "one of the two. The answer has <code>scores</code>, a probability for each candidate in order (of "
        "several labels by their name), and <code>step</code>.</p>",
        "<p>The same as an Arrow IPC stream (<code>application/vnd.apache.arrow.stream</code>): candidates "
        "are the rows, <code>shared</code> is JSON in the schema's metadata; not compressed, and without "
        "dictionary-encoded columns or views. Ask for an answer in Arrow by "
        "<code>Accept</code>.</p>",
        f"<p>At most {settings.max_candidates:,} candidates and {settings.max_body_bytes:,} bytes a request. "
        "Errors name what is wrong and the field: 400 no JSON or Arrow, 413 too large, 422 a wrong value, "
        "408 and 503 too slow or too many.</p>",
        '<p><a href="healthz">/healthz</a> · <a href="metrics">/metrics</a> (Prometheus) · '
        '<a href="openapi.json">/openapi.json</a></p>',
        "<h2>Columns</h2><div class=scroll><table><thead><tr><th class=text>name</th><th class=text>kind</th>"
        f"<th class=text>value</th></tr></thead><tbody>{lines}</tbody></table></div>",
        "<h2>Try it</h2>",
        f'<textarea id="body" rows="14" spellcheck="false">{escape(example)}</textarea>',
        '<p><button id="send">Score</button></p><pre id="answer"></pre>',
        f"<script>{_SCRIPT}</script>",
    ]
    return page("Rowhaul: scores", body, _STYLE)


def openapi_request(folder: ServedFolder) -> dict[str, Any]:
    """Return what OpenAPI says of the body of /score."""
    columns = [*folder.schema.features, *(one.name for one in folder.schema.dense)]
    values: dict[str, Any] = {"type": "object", "properties": {name: {} for name in columns}}
    by_column = {**values, "additionalProperties": {"type": "array"}}
    schema = {
        "type": "object",
        "required": ["candidates"],
        "properties": {
            "shared": values,
            "candidates": {"oneOf": [{"type": "array", "items": values}, by_column]},
        },
        "example": example_request(folder.schema, folder.key_kinds),
    }
    content = {"application/json": {"schema": schema}, "application/vnd.apache.arrow.stream": {}}
    return {"requestBody": {"required": True, "content": content}}
