"""Services of the machine for coordinator and node, such as private files, settings, logs, Bonjour and sleep."""
