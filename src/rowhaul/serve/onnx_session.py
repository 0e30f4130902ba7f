"""Opening graphs with ONNX Runtime, which need not be installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rowhaul.errors import ConfigError


def has_onnxruntime() -> bool:
    """Whether ONNX Runtime is installed."""
    return find_spec("onnxruntime") is not None


def open_session(path: Path, threads: int) -> Any:
    """Open a graph; a request may use ``threads``."""
    if not has_onnxruntime():
        raise ConfigError(f"{path} needs ONNX Runtime: pip install 'rowhaul[serve]'")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other requests need it
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def only_what_is_asked_for() -> Any:
    """Return options that leave out nodes which no asked-for output needs."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True
    return options
