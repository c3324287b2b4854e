"""Router: the single endpoint with queue, placement, dispatch and client dialects."""
