"""Embeddings in the engine: forwards of decoders without decode, and the steps from hidden states to vectors."""
