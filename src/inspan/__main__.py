"""`python -m inspan` is the command `inspan`."""

from inspan.cli import main

if __name__ == "__main__":
    main()
