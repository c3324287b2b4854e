"""Files next to the weights of a model that change its prompts or answers."""

IDENTITY_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tiktoken.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "1_Pooling/config.json",
    "1_LogitScore/config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "3_Dense/config.json",
    "3_Dense/model.safetensors",
    "4_Dense/config.json",
    "4_Dense/model.safetensors",
)
"""Paths, below the folder of a model, of the files that change its prompts or answers, without the weights.

The order is that of the fingerprint.
"""
