"""Looking inside a model: attention maps."""
