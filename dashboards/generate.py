"""Writes the JSON of every dashboard. `make docs` runs it; a test compares the committed files with its output."""

import sys
from pathlib import Path

from dashboards import memory, pool, requests, video
from dashboards.panels import Board, write

HERE = Path(__file__).parent
BOARDS: dict[str, Board] = {
    "pool.json": pool.BOARD,
    "requests.json": requests.BOARD,
    "memory.json": memory.BOARD,
    "video.json": video.BOARD,
}


def main() -> int:
    """Write all files."""
    for name, board in BOARDS.items():
        (HERE / name).write_text(write(board))
    return 0


if __name__ == "__main__":
    sys.exit(main())
