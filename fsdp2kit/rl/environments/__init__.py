"""Environments of the user's, and the model's conversations with them."""
