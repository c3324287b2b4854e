"""Macpool as a system service: installs, checks and removes the units of launchd and systemd."""
