"""Policies: pure functions from what a device has, what a pipeline needs and what was asked, to a decision with a reason."""
