"""Services of the machine for coordinator and node: private files, settings, logs, Bonjour, sleep, power and pauses."""
