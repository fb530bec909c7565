"""`python -m andrea_pl` is `andrea`."""

import sys

from andrea_pl.cli import main

if __name__ == "__main__":
    sys.exit(main())
