"""`python -m jetspec`: the library's commands."""

from jetspec.cli import main

main()
