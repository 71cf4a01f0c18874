"""Proofs of family files: that a file says of a model class and of its checkpoints what is so."""
