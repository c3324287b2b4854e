"""The control plane, /api/v1: every verb of `cluster` as one documented route, a module for each subject."""
