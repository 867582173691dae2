"""Compile every kernel in every launch row for every chip, without one, and read what came out."""
