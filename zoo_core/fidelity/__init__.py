"""How much of a model survives when its attention is swapped."""
