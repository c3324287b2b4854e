"""Parts that all client dialects use: fields, formats, tools, strict JSON and validation."""
