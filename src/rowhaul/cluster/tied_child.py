"""Starts a command that ends with its parent: ``python tied_child.py PARENT_PID COMMAND...``.

A separate program without imports of ours: only the child itself can make this request to the kernel, and
Python cannot safely run code between fork and exec. The request survives exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to its parent and become the command."""
    parent = int(arguments[0])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request
        sys.exit(1)
    os.execvp(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
