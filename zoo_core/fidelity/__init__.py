"""How much of a model survives when its attention is swapped, and how to win back the rest.

`calibration` heals a patched model, `retaining` measures it, `distillation` trains a student.
"""
