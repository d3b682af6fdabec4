"""Weights: what tensors are called in modules and in files, what they are made of, where they come from and go."""
