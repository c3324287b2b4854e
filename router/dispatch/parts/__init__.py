"""Parts of the dispatcher, each with one responsibility."""
