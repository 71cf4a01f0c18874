"""Policies: pure functions from what a device has, a pipeline needs and a user asked, to a decision with a reason."""
