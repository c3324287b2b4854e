"""Read-only reports about the node of this machine, for `cluster doctor` and `cluster config`."""
