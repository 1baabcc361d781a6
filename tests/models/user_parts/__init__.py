"""Parts as a user would write them, outside the package."""
