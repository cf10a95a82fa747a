"""vLLM's names that are no settings here, past and present: one table of what each is answered with."""
