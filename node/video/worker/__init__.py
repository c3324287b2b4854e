"""Video worker of one lease: its program, its parent process, its monitor and the watchdog policy."""
