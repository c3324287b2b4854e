"""Rules that decide when this Mac accepts work, and the controller that applies them."""
