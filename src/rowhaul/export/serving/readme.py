"""The page that a served folder explains itself with."""

from __future__ import annotations

import json
from typing import Any

from rowhaul.data.schema import Schema
from rowhaul.serve.page import example_request


def readme(manifest: dict[str, Any], schema: Schema) -> str:
    """Return Markdown on what each file holds and how to use it."""
    features = manifest["features"]
    body = json.dumps(example_request(schema, manifest["key_kinds"]))
    inputs = "`pooled` and `numbers`" if manifest["numbers"] else "`pooled`"
    lines = [
        "# A model to serve",
        "",
        f"Model: {manifest['model']}, trained for {manifest['step']:,} steps on "
        f"{manifest['samples']:,} samples.",
        *(_compared(manifest["compared"]) if "compared" in manifest else _PUBLISHED),
        "",
        "| file | holds |",
        "|---|---|",
        "| `served.json` | what is what, with sizes and checksums (XXH3, 64 bits) |",
        "| `schema.yaml` | the columns of a request |",
        f"| `{manifest['rows']['file']}` | all rows, in one file to be mapped into memory |",
        *(
            f"| `{one['file']}` | {_GRAPHS[kind].format(inputs=inputs)} |"
            for kind, one in manifest["dense"].items()
        ),
        "",
        "```",
        "rowhaul serve . --port 8080",
        f"curl -d '{body}' -H 'Content-Type: application/json' localhost:8080/score",
        "```",
        "",
        "```python",
        "from rowhaul.serve import Scorer",
        "",
        f'scores = Scorer(".").score(**{body})',
        "```",
        "",
        f"Without Rowhaul: a sample's vector `pooled` has {manifest['width']} columns. Each id feature adds",
        "the rows of its ids into columns of its own, from the first one named here on. How to find a row in",
        "the file is described in Rowhaul's docs/row-file.md, with a reader in Python and one in C.",
        "",
        "| feature | table | first column |",
        "|---|---|---|",
        *(f"| {one['name']} | {one['table']} | {one['column']} |" for one in features),
    ]
    limits = [f"the last {one.max_length} of {one.name}" for one in schema.ids if one.max_length]
    if limits:
        lines += ["", f"Of a list that is longer, only the newest ids are added: {', '.join(limits)}."]
    if manifest["numbers"]:
        lines += ["", f"`numbers` has these columns: {', '.join(manifest['numbers'])}.", *_transforms(schema)]
    lines += ["", "A score is `1 / (1 + exp(-logit))`."]
    return "\n".join(lines) + "\n"


_PUBLISHED = (
    "This is a base that training has published. It goes on, and publishes what changes: the newest version",
    "is the base with all deltas that `served.json` names, in order (Rowhaul's docs/deltas.md).",
)


def _compared(about: dict[str, Any]) -> list[str]:
    largest = ", ".join(f"{value:.1e} ({kind})" for kind, value in about["largest_differences"].items())
    return [
        f"Logits of {about['samples']:,} samples, {about['unseen_ids']:,} unseen ids among them, were "
        f"compared with the trained model's: the largest difference is {largest}."
    ]


_GRAPHS = {
    "onnx": "the rest of the model as ONNX: {inputs} to `logits`",
    "pt2": "the rest of the model for `torch.export.load`: {inputs} to `logits`",
    "dots": "its weights, with which `rowhaul serve` computes once what all candidates share",
}


def _transforms(schema: Schema) -> list[str]:
    logs = [column.name for column in schema.dense if column.transform == "log1p"]
    return [f"Of {', '.join(logs)} the graph expects `log(1 + max(x, 0))`."] if logs else []
