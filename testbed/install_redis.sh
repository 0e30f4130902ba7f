#!/bin/sh
# Install redis-server for the tests that need it, where that is possible; they are skipped without it.
command -v redis-server >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get install -y -qq redis-server >/dev/null 2>&1 && exit 0
fi
echo "redis-server is not installed and cannot be installed here: tests of Redis Streams are skipped"
