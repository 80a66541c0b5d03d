"""The command ``fedproj``: the same program as the binary."""

import sys

from fedproj import _fedproj


def main() -> int:
    """Runs the command line and returns its exit code."""
    return _fedproj.main(["fedproj", *sys.argv[1:]], [sys.executable, "-m", "fedproj"])


if __name__ == "__main__":
    sys.exit(main())
