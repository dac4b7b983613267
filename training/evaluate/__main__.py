import sys

from training.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
