"""Verification: cases generated from the rows, hostile inputs, one judge, the faults that it must catch."""
