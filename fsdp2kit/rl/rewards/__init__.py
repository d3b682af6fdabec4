"""Reward functions of the user's, each in a process of its own."""
