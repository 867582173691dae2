"""One process of `anymla verify --machine`."""

import sys

from anymla.verification.amdgcn.conformance import main

main(sys.argv[1:])
