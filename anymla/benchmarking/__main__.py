"""`python -m anymla.benchmarking`: see `commands`."""

from anymla.benchmarking.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
