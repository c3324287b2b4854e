"""Prediction of a model from the metadata of its repository."""
