# A command on a host, for as long as somebody attends to it: $1 is its line, $2 its mark. For any /bin/sh, since this
# runs once for every command on every host; what ends things, which is seldom, is for bash.
# What it starts inherits the mark in its environment. Standard input is the way to us: a word or its end (we, or the
# connection, are gone) ends all that carries the mark: SIGINT, later SIGTERM, later or at the word `now` SIGKILL.
exec 3<&0 </dev/null
{
  read -r word <&3
  # The command, which has this shell's number, has ended by itself: what it left running may stay.
  kill -0 $$ || exit
  exec /bin/bash -c '
trap "" TERM
mark=$1 word=$2 command=$3
# Set `left` to all that carries the mark; false once nothing does or will: until the command begins, its number is that
# of this whole script, which has the mark among its arguments.
look() {
  grep -qs "$mark" /proc/$command/cmdline
  begun=$?
  left=$(grep -lzsx "TPUSWARM_EXEC=$mark" /proc/[0-9]*/environ | cut -d/ -f3)
  [ -n "$left" ] || [ $begun = 0 ]
}
asked=
for ((turn = 0; turn < 100; turn++)); do
  [ "$word" = now ] && break
  look || exit
  [ -n "$left" ] && [ -z "$asked" ] && asked=yes && kill -INT $left
  [ $turn = 50 ] && kill -TERM $left
  read -rt 0.1 word <&3
  [ $? = 1 ] && sleep 0.1
done
while look; do kill -KILL $left; sleep 0.05; done
' attend "$2" "$word" $$
} >/dev/null 2>&1 &
exec 3<&-
# The number is that of the command itself: what it has left running may be told from it (doctor/processes.py).
export TPUSWARM_EXEC="$2" TPUSWARM_EXEC_PID=$$
exec /bin/bash -c "$1"
