"""Download of files: pieces on the disk, sources, and the transfer between them."""
