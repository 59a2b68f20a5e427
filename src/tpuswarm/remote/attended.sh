# A command on a host, for as long as somebody attends to it: $1 is its line, $2 its mark.
# What it starts inherits the mark in its environment. Standard input is the way to us: a word or its end (we, or the
# connection, are gone) ends all that carries the mark: SIGINT, later SIGTERM, later or at the word `now` SIGKILL.
exec 3<&0 </dev/null
marked() { grep -lzsx "TPUSWARM_EXEC=$1" /proc/[0-9]*/environ | cut -d/ -f3; }
attend() {
  read -r word <&3
  trap '' TERM
  for ((turn = 0; turn < 100; turn++)); do
    [ "$word" = now ] && break
    left=$(marked "$1")
    [ -z "$left" ] && return
    [ $turn = 0 ] && kill -INT $left
    [ $turn = 50 ] && kill -TERM $left
    read -rt 0.1 word <&3
    [ $? = 1 ] && sleep 0.1
  done
  while left=$(marked "$1") && [ -n "$left" ]; do kill -KILL $left; sleep 0.05; done
}
attend "$2" >/dev/null 2>&1 &
attends=$!
exec 3<&-
TPUSWARM_EXEC=$2 /bin/bash -c "$1"
code=$?
kill $attends 2>/dev/null
wait $attends 2>/dev/null
exit $code
