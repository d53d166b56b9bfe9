"""What setup.cfg cannot say: the description that a package index shows, where links into this repository lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

NOTE = "\n\nThe pages that this text names are in the source distribution, under `docs/`.\n"


def description(readme: str) -> str:
    """The README with relative links as text, and without its pictures."""
    without_pictures = re.sub(r"[:.]?\n\n!\[[^\]]*\]\((?!https?:)[^)]*\)$", ".", readme, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", without_pictures).rstrip() + NOTE


if __name__ == "__main__":
    setup(long_description=description(Path(__file__).with_name("README.md").read_text(encoding="utf-8")))
