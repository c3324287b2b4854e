"""Entry point of `python -m coordinator.cli`, the same as `cluster`."""

from coordinator.cli import main

main()
