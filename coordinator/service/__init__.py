"""Macpool as a system service: installation, check and removal of the units of launchd and systemd."""
