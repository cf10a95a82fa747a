"""How long a step takes: counted work, and constants measured by the engine itself. No torch."""
