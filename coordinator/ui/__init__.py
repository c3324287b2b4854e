"""The page: its files, who may sign in, and what it is told while it is open."""
