"""Client dialects: convert request bodies to requests for the dispatcher, and their results to answers."""
