"""Client dialects: translate request bodies to frames and frames to answers."""
