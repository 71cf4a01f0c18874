"""The key map: how the names in a file and the names in a model are one another, read both ways."""
