"""What mechanisms share. Plugin authors may import from here.

Import the module you need: `from zoo_core.nn import masks`.
"""
