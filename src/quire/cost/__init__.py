"""The time of a step: counted work times constants that the engine measures itself. No torch."""
