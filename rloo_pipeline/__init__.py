"""Replayable RLOO (REINFORCE Leave-One-Out) for language models: stages that turn files into files."""

__version__ = "0.1.0"
