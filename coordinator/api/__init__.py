"""The control plane, /api/v1: each verb of `cluster` is one documented route. `routes` has a module per subject."""
