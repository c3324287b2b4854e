"""Commands of a model's owner: quantize a model, and measure its speeds."""
