"""Client dialects: bodies in, frames out; frames in, bodies out."""
