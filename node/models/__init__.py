"""Models on the disk of this Mac, and the embedded model."""
