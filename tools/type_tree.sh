#!/bin/sh
# type_tree.sh DIR: lays the sources out as they are installed (links), for the type checker.
set -eu
rm -rf "$1"
mkdir -p "$1/ronde"
for source in python/ronde/* adapters/* launcher; do
  ln -s "$PWD/$source" "$1/ronde/$(basename "$source")"
done
