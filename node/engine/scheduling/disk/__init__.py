"""The disk cache in the scheduler."""
