"""Which tables are worth scoring: those whose cached rows are mostly rare (Herald, section 4.3).

A row that every worker needs all the time cannot be trained in one fixed place, so it tells nothing
about where a sample belongs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rank_tables(
    tables: npt.NDArray[np.int32], appearances: npt.NDArray[np.int32], samples_per_worker: int
) -> tuple[int, ...]:
    """Tables by their degree of infrequency, highest first; equal ones by their number.

    A cached row is infrequent when it appeared in fewer samples than one worker has trained; the
    degree of a table is the share of such rows among its cached ones. Tables without a cached row
    cannot score and are left out.

    Args:
        tables: the table of every row that some worker's cache holds.
        appearances: in how many samples each of them has appeared so far.
        samples_per_worker: samples that one worker has trained so far, in the mean.
    """
    cached = np.bincount(tables)
    infrequent = np.bincount(tables[appearances < samples_per_worker], minlength=len(cached))
    known = np.flatnonzero(cached)
    degree = infrequent[known] / cached[known]
    return tuple(known[np.argsort(-degree, kind="stable")].tolist())
