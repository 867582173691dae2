"""Adapters to other frameworks; each imports its framework only in its own files."""
