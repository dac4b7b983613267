"""`python -m shoal`: the `shoal` command, for environments whose scripts are not on the path."""

from shoal.cli import main

if __name__ == "__main__":
    main()
