"""The ways in: LLM, AsyncLLM and `quire serve`, and how a process starts, listens and stops."""
