"""Settings as short texts, by which ranks and checkpoints compare them and name what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.digest import digest
from rowhaul.schedule.dispatch import make_dispatcher, text_of
from rowhaul.schedule.dispatch.task import Dispatcher
from rowhaul.schedule.lifetimes.policy import RowPolicy

LONGEST = 80  # characters; what is longer is cut and told apart by a hash


def numbers_text(numbers: Sequence[int] | npt.NDArray[np.int64]) -> str:
    """Numbers, each with how often it follows itself: ``64x3, 128``."""
    runs = [(number, len(list(run))) for number, run in groupby(int(number) for number in numbers)]
    return shortened(", ".join(f"{number}x{times}" if times > 1 else str(number) for number, times in runs))


def rows_text(tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> str:
    """A set of rows: how many, and a hash."""
    order = np.lexsort((keys, tables))
    tables, keys = tables[order], keys[order]
    new = np.append(True, (np.diff(tables) != 0) | (np.diff(keys) != 0))[: len(keys)]
    return (
        f"{new.sum()} rows, hash {digest('', (tables[new], keys[new])).hex()[:16]}" if len(keys) else "none"
    )


def policies_text(policies: Sequence[RowPolicy]) -> str:
    """The policies of all tables, in order, each with how often it follows itself."""
    runs = [(text, len(list(run))) for text, run in groupby(policy.text() for policy in policies)]
    return shortened("; ".join(f"{text} x{times}" if times > 1 else text for text, times in runs))


def dispatcher_text(dispatcher: str | Dispatcher) -> str:
    """The text that makes the dispatcher, all settings included; of one made elsewhere its name and class."""
    made = make_dispatcher(dispatcher) if isinstance(dispatcher, str) else dispatcher
    return text_of(made) or f"{made.name} ({type(made).__module__}.{type(made).__qualname__})"


def shortened(text: str) -> str:
    """The text, or its beginning and a hash of it."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 25]}... hash {digest(text, ()).hex()[:16]}"


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What two descriptions say differently, one sentence each: ``name: ours here, theirs there``."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [
        f"{name}: {ours.get(name, 'unknown')} here, {theirs.get(name, 'unknown')} there" for name in names
    ]
