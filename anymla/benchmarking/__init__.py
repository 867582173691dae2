"""Benchmarks: a case is verified, then timed; a number stands beside what the machine can do at best."""
