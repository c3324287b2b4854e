"""Text of models: tokenizer, detokenizer, markers, stop strings, tool calls and log probabilities."""
