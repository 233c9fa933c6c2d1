"""The steps of the schema's history, oldest first by their names."""
