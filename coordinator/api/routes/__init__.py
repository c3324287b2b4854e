"""Routes of the control API, one module for each subject."""
