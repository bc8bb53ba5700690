"""``python -m proxreplay``."""

from proxreplay.cli import main

if __name__ == "__main__":
    main()
