"""The single endpoint: queue, placement, dispatch, and the dialects that clients speak."""
