"""The flight recorder, what its records say together, and how much the collectives check."""
