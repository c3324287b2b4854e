"""OpenAI's API: chat completions, completions, responses, models, and the body of a video job."""
