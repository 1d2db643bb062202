"""Looking a project over without running it."""
