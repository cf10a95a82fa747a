"""The API process without HTTP: prompts become engine requests, and engine messages become text. No torch."""
