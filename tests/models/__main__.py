"""`make models`: train the models in tests/models/trained anew, after what they learn or their shape has changed."""

from concurrent.futures import ThreadPoolExecutor

from tests import models


def main() -> None:
    """Train two at a time."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(models.train, models.TRAINED))


if __name__ == "__main__":
    main()
