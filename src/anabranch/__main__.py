"""`python -m anabranch`: the command line."""

from .router.cli import main

main()
