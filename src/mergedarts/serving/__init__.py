"""Corrections inside a serving engine that does not run Hugging Face's models."""
