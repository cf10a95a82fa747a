"""vLLM's names that are no settings here, past and present: one table with the answer to each."""
