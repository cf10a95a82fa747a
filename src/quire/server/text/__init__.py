"""From the text of an answer to its parts: content, reasoning and tool calls. Without torch and without HTTP."""
