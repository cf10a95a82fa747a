"""vLLM's path of the forms of a prompt."""

from quire.frontend.prompts import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
