"""Saves beside training, for tests that must not depend on how fast they are written."""

import threading


def wait_for_saves() -> None:
    """Wait until no checkpoint is being written in this process."""
    for thread in threading.enumerate():
        if thread.name == "rowhaul-save":
            thread.join()
