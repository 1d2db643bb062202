"""Reward models from preference pairs."""
