"""Spinner in the terminal for commands that wait."""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

from coordinator.client.terminal_text import get_raw_stream

SPINNER_DELAY_SECONDS = 1.0
"""Seconds before a spinner appears, because a short wait needs none."""


@contextmanager
def show_spinner(text: str) -> Generator[None]:
    """Show a spinner with `text` and the elapsed time while the context is open, after `SPINNER_DELAY_SECONDS`.

    Do nothing if standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    progress = Progress(*columns, console=Console(file=get_raw_stream(sys.stderr)), transient=True)
    progress.add_task(text, total=None)
    timer = threading.Timer(SPINNER_DELAY_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if progress.live.is_started:
            progress.stop()
