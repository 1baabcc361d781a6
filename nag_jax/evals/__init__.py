"""Evaluation and sampling of trained models."""
