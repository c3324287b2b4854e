"""Commands of `cluster video`: videos, and the machines that generate them."""
