"""Measurements of models and runs, and the yardsticks they are read against."""
