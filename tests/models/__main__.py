"""`python -m tests.models`: train what the tests ask of, where it is missing, before any of them waits for it."""

from concurrent.futures import ThreadPoolExecutor

from tests import models

TRAINED = ("qwen3_next", "gemma3_text", "qwen3", "lfm2")
"""The longest first: up to a minute and a half each."""


def main() -> None:
    """Train two at a time."""
    with ThreadPoolExecutor(2) as threads:
        for folder in threads.map(models.path, TRAINED):
            print(folder.name, flush=True)


if __name__ == "__main__":
    main()
