"""`make models`: train the models in tests/models/trained again, after a change of their lessons or their shape."""

from concurrent.futures import ThreadPoolExecutor

from tests import models


def main() -> None:
    """Train the models, two at a time."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(models.train, models.TRAINED))


if __name__ == "__main__":
    main()
