"""`python -m anabranch.router.sharing.owner SOURCE LINGER FD`: the owner that a client has started."""

import sys

from .process import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
