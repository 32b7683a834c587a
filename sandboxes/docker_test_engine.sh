#!/usr/bin/env bash
# A Docker daemon of one's own, for tests: it sets up no network and leaves other daemons alone.
#
#   docker_test_engine.sh start DIR   start it, wait until it answers, print `export DOCKER_HOST=...`
#   docker_test_engine.sh stop DIR    stop exactly that one and wait until it is gone
#
# A unix socket's path has at most 107 bytes, so DIR must be short. Exit 2: it cannot run here.
set -euo pipefail

WAIT_S=30

fail() {
  echo "docker_test_engine: $1" >&2
  exit "${2:-1}"
}

start() {
  command -v dockerd >/dev/null || fail "dockerd is not installed: apt-get install docker.io" 2
  test "$(id -u)" = 0 || fail "dockerd needs root" 2
  mkdir -p "$dir"
  test ! -e "$dir/pid" || fail "$dir/pid exists: stop that daemon first"
  : >"$dir/log"
  # Without these options it would change the host's firewall, bridges and ip_forward.
  setsid dockerd --iptables=false --ip6tables=false --ip-forward=false --bridge=none \
    --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/pid" \
    -H "unix://$dir/docker.sock" >"$dir/log" 2>&1 </dev/null &
  local daemon=$! limit=$((SECONDS + WAIT_S))
  until grep -q "API listen on" "$dir/log"; do
    kill -0 "$daemon" 2>/dev/null || fail "dockerd ended: $(tail -n 1 "$dir/log")"
    test "$SECONDS" -lt "$limit" || fail "dockerd does not answer after $WAIT_S s; see $dir/log"
    sleep 0.05
  done
  echo "export DOCKER_HOST=unix://$dir/docker.sock"
}

# dockerd, and not another process that got its number.
is_running() {
  tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -qF -- "--pidfile $dir/pid "
}

stop() {
  test -s "$dir/pid" || return 0
  local daemon limit=$((SECONDS + WAIT_S))
  daemon=$(cat "$dir/pid")
  ! is_running "$daemon" || kill "$daemon"
  while is_running "$daemon"; do
    test "$SECONDS" -lt "$limit" || fail "dockerd (pid $daemon) is still there after $WAIT_S s"
    sleep 0.05
  done
  rm -f "$dir/pid"
}

test $# = 2 || fail "usage: docker_test_engine.sh start|stop DIR" 64
mkdir -p "$(dirname "$2")"
dir=$(realpath -m "$2")
case "$1" in
  start) start ;;
  stop) stop ;;
  *) fail "usage: docker_test_engine.sh start|stop DIR" 64 ;;
esac
