"""The API process without HTTP: prompts to engine requests, engine messages to text. Never imports torch."""
