"""`python -m diloco` is the command line."""

from diloco.cli import main

if __name__ == "__main__":
    main()
