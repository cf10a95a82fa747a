"""A chat in the terminal: the conversation, the input line, and the model that answers (own engine or server)."""
