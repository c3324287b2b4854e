"""What coordinator and node both do to the machine they are on: private files, the log, announcing on the LAN."""
