"""Models: their files, versions and kinds, and the query of a hub."""
