"""Rows of the MLX engine, with its clients and peers."""
