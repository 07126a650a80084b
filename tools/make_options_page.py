"""Writes docs/options.md from the option table of the core (core/base/options.def, through ronde._core.OPTIONS).

python tools/make_options_page.py [--check]

With --check nothing is written; the exit code is 1 when the page is not what the table says.
"""

import argparse
import sys
from pathlib import Path

from ronde import _core

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
HEAD = """<!-- Made by tools/make_options_page.py from core/base/options.def. Do not edit. -->
# Options

Every option is an environment variable `RONDE_<NAME>`; where that is not set, `HOROVOD_<NAME>` is read. Most have a flag
of `ronderun` and a key in the section of its config file that is given here; a flag wins over the file, the file over the
environment. Where a flag counts in another unit, its value is multiplied as shown.

Options of the whole **job** are those of rank 0, whatever the other ranks say; an option of a **rank** is each rank's own.
"""
TYPES = {"Bool": "0 or 1", "Int": "integer", "Double": "number", "String": "text"}


def page() -> str:
    sections: dict[str, list[str]] = {}
    for name, type_, default, scope, flag, scale, section, text in _core.OPTIONS:
        shown_flag = f"`{flag}`" + ("" if scale == 1 else f" (x {scale:.0f})") if flag else ""
        shown_default = "`" + default.strip('"') + "`" if default.strip('"') else "empty"
        row = f"| `RONDE_{name}` | {TYPES[type_]} | {shown_default} | {scope.lower()} | {shown_flag} | {text} |"
        sections.setdefault(section, []).append(row)
    parts = [HEAD]
    for section, rows in sections.items():
        parts.append(
            f"\n## {section}\n\n| variable | value | default | of | flag | meaning |\n|---|---|---|---|---|---|\n"
        )
        parts.extend(row + "\n" for row in rows)
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    if not arguments.check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is not what the option table says: run tools/make_options_page.py")


if __name__ == "__main__":
    main()
