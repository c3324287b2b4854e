"""`python -m coordinator.cli` is `cluster`."""

from coordinator.cli import main

main()
