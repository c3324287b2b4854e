"""Parts that several client dialects use: fields, answer formats, tools, strict JSON and validation."""
