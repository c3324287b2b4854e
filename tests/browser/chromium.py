"""The Chromium that shows the page in tests, benchmarks and pictures."""

import shutil

NAMES = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"
"""Programs that show the page, the first one preferred: the shell without a window needs 40 % of the CPU time."""
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
"""Path of the first program of NAMES that is installed; None if there is none."""
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""Arguments of every start."""
