"""Video worker of one lease: its process, its parent, its monitor and the watchdog policy."""
