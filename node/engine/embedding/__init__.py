"""Embeddings and scores in the engine: forwards of decoders and encoders, and the steps from states to vectors."""
