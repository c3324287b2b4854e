"""Generator of the JSON of all dashboards, run by `make docs`. A test compares the committed files with its output."""

import sys
from pathlib import Path

from dashboards import memory, pool, requests, video
from dashboards.panels import Board, render_board

HERE = Path(__file__).parent
BOARDS: dict[str, Board] = {
    "pool.json": pool.BOARD,
    "requests.json": requests.BOARD,
    "memory.json": memory.BOARD,
    "video.json": video.BOARD,
}


def main() -> int:
    """Write the JSON files of all dashboards. Return the exit code 0."""
    for name, board in BOARDS.items():
        (HERE / name).write_text(render_board(board))
    return 0


if __name__ == "__main__":
    sys.exit(main())
