"""``python -m rowhaul``, for launchers such as torchrun."""

from rowhaul.cli import main

main()
