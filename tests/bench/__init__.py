"""`make bench`: speed as ratios against a named peer or a limit in one run."""
