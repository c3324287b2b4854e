"""Parts of the coordinator's start: options, state, cluster side, HTTP side and periodic tasks."""
