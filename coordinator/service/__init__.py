"""Macpool as a service of the system: units for launchd and systemd, written, loaded, looked at and taken away."""
