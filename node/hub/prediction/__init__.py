"""Predict the memory and the properties of a model from the metadata of its repository."""
