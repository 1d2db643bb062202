"""Looking at what happened: the artifacts of an iteration as tables for a notebook."""

from rloo_pipeline.audit.joined import iterations, load
from rloo_pipeline.audit.views import group, groups, tokens

__all__ = ["group", "groups", "iterations", "load", "tokens"]
