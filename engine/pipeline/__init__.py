"""Pipelines: planned part by part, then put together."""
