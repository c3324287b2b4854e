#!/bin/sh
# Writes the two hash-locked requirement files anew. Run by `make lock`; needs uv as $UV.
set -eu
cd "$(dirname "$0")/.."
: "${UV:?}"
flags="--universal --generate-hashes --python-version 3.11 --no-header --no-emit-index-url --no-emit-find-links --quiet"
# shellcheck disable=SC2086
"$UV" pip compile $flags pyproject.toml --extra node --extra video -o requirements/run.txt
# shellcheck disable=SC2086
"$UV" pip compile $flags pyproject.toml --group dev --extra node --extra video -c requirements/run.txt -o requirements/dev.txt
