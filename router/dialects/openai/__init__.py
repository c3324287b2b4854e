"""OpenAI's chat completions, completions, responses, models and videos."""
