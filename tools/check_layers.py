"""Checks that core/ includes only downwards. Reads the layer table of docs/architecture.md; exit code 1 names each culprit.

A row is ``| level | module | responsibility | may include |``; the last column lists modules, ``std`` or ``all below``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([a-z_]+)/', re.MULTILINE)


def read_table(page: Path) -> dict[str, set[str]]:
    """module -> modules it may include."""
    rows: list[tuple[int, str, str]] = []
    for line in page.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and cells[0].isdigit():
            rows.append((int(cells[0]), cells[1].strip("`"), cells[3]))
    allowed: dict[str, set[str]] = {}
    for level, module, text in rows:
        if "all below" in text:
            allowed[module] = {name for other, name, _ in rows if other < level}
        else:
            allowed[module] = set(re.findall(r"[a-z_]+", text)) - {"std"}
    return allowed


def violations(root: Path) -> list[str]:
    allowed = read_table(root / "docs" / "architecture.md")
    if "base" not in allowed or "engine" not in allowed:
        return ["docs/architecture.md: no layer table was found"]
    found = []
    for path in sorted((root / "core").rglob("*")):
        if path.suffix not in (".h", ".cc", ".inc"):
            continue
        module = path.relative_to(root / "core").parts[0]
        if module == "include":
            continue
        text = path.read_text()
        for match in _INCLUDE.finditer(text):
            target = match.group(1)
            if target != module and target not in allowed.get(module, set()):
                line = text.count("\n", 0, match.start(1)) + 1
                found.append(f"{path.relative_to(root)}:{line}: {module} may not include {target}")
    return found


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = violations(root)
    print("\n".join(found) if found else "layers: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
