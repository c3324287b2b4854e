"""Services of the host that coordinator and node share: private files, logs, Bonjour, sleep and power."""
