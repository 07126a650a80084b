#!/bin/sh
# need.sh WHAT...: makes sure that the tools a build needs are there; as root it installs what is missing from Debian.
set -eu
has_library() { ldconfig -p | grep -q "$1"; }
missing=""
for what in "$@"; do
  case "$what" in
    g++) command -v g++ >/dev/null || missing="$missing g++" ;;
    cmake) command -v cmake >/dev/null || missing="$missing cmake" ;;
    ninja) command -v ninja >/dev/null || missing="$missing ninja-build" ;;
    gtest) [ -e /usr/include/gtest/gtest.h ] || missing="$missing libgtest-dev" ;;
    venv) python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv" ;;
    libgomp) has_library libgomp.so.1 || missing="$missing libgomp1" ;;
    libquadmath) has_library libquadmath.so.0 || missing="$missing libquadmath0" ;;
    ip) PATH=$PATH:/usr/sbin command -v ip >/dev/null || missing="$missing iproute2" ;;
    sshd) PATH=$PATH:/usr/sbin command -v sshd >/dev/null || missing="$missing openssh-server openssh-client" ;;
    *) echo "need.sh: unknown tool $what" >&2; exit 2 ;;
  esac
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "please install:$missing" >&2
  exit 1
fi
apt-get update -qq
# shellcheck disable=SC2086  # a list
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
