"""Notify parts that are constructed later than the part that notifies them."""

from collections.abc import Callable


class Notifier:
    """List of callbacks without arguments."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` at each later `notify`."""
        self._callbacks.append(callback)

    def notify(self) -> None:
        """Call all callbacks in the order of their subscription."""
        for callback in self._callbacks:
            callback()
