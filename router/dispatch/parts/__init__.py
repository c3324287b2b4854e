"""Parts of the dispatcher, each of which performs some of the actions or handles some of the events of a request."""
