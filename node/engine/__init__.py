"""Engine process of a node: the only process that runs language models."""
