"""Video on a node: its packages, its environment, its worker and its watchdog."""
