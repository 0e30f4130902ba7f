"""The work of a run, written once: Parquet files for Rowhaul, arrays with numbered ids for its peers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from peer_ranks.contenders import Setting
from rowhaul.data.generate.folder import generate_folder


def write_work(folder: Path, setting: Setting, steps: int) -> None:
    """A Criteo-like log of so many batches: 26 ids and 13 numbers a sample."""
    generate_folder("criteo", setting.batch * steps, folder, test_share=0.0)
    table = pq.read_table(sorted(folder.glob("part-*.parquet")))
    names = table.column_names
    ids, num_rows = [], []
    for name in (one for one in names if one.startswith("C")):
        column = table[name].combine_chunks()
        present = ~np.asarray(column.is_null())
        found, numbers = np.unique(np.asarray(column.drop_null()), return_inverse=True)
        numbered = np.full(len(column), -1, np.int64)
        numbered[present] = numbers
        ids.append(numbered)
        num_rows.append(len(found))
    dense = np.stack([np.asarray(table[name].fill_null(0)) for name in names if name.startswith("I")], axis=1)
    np.savez(
        folder / "work.npz",
        ids=np.stack(ids),
        dense=np.log1p(np.maximum(dense, 0)).astype(np.float32),
        labels=np.asarray(table["label"]).astype(np.float32),
    )
    facts = {
        "batch": setting.batch, "num_rows": num_rows, "num_dense": dense.shape[1], "dim": setting.dim,
        "bottom": setting.bottom, "top": setting.top, "every": setting.every,
    }  # fmt: skip
    (folder / "work.json").write_text(json.dumps(facts))
