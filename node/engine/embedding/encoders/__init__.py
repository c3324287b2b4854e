"""Encoders on MLX: hidden states of whole texts, and the classifiers of cross-encoders."""
