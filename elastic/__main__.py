"""`python -m elastic …` is the same as `elastic …`."""

from elastic.cli import main

main()
