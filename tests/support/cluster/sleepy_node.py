"""A node whose machine can be sent to sleep: SIGHUP announces sleep, SIGWINCH wake-up. Arguments: the node's."""

import signal
import sys
from collections.abc import Callable

from host import sleep_watch
from host.sleep_watch import NoSleepNotices
from node.run import main


class Signals(NoSleepNotices):
    """Source that announces a sleep at SIGHUP and the wake-up at SIGWINCH."""

    def start(self, on_sleep: Callable[[Callable[[], None]], None], on_wake: Callable[[], None]) -> bool:
        signal.signal(signal.SIGHUP, lambda *_: on_sleep(lambda: None))
        signal.signal(signal.SIGWINCH, lambda *_: on_wake())
        return True


if __name__ == "__main__":
    sleep_watch.open_sleep_notices = Signals
    sys.exit(main(sys.argv[1:]))
