#!/usr/bin/env bash
# clang-format over every C and C++ source: `-i` rewrites, `--dry-run -Werror` only looks.
# Version 14 is what the tree is formatted with; others differ in details, so only its word counts.
set -euo pipefail
cd "$(dirname "$0")/.."
formatter=$(command -v clang-format-14 || command -v clang-format || true)
if [ -z "$formatter" ]; then
    echo "format: no clang-format here; run scripts/deps.sh check" >&2
    exit 1
fi
if [ "${1:-}" != -i ] && ! "$formatter" --version | grep -q 'version 14\.'; then
    echo "format: not checked: clang-format 14 is not here, and other versions differ in details"
    exit 0
fi
git ls-files -coz --exclude-standard -- '*.c' '*.h' '*.cpp' '*.cu' | sort -zu |
    while IFS= read -r -d '' file; do if [ -e "$file" ]; then printf '%s\0' "$file"; fi; done |
    xargs -0 -r "$formatter" "$@"
