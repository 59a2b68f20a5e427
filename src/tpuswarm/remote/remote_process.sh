# Run the shell line $1 until it ends, or until our caller ends it. Its processes inherit the mark $2.
# Standard input controls it: a word, or the end of input (a lost connection), ends every process with the mark:
# SIGINT first, SIGTERM later, SIGKILL at last or after the word `now`.
# The fast path runs in any /bin/sh; only ending processes needs bash.
exec 3<&0 </dev/null
{
  read -r word <&3
  # The command has this shell's process id. If it has ended by itself, its leftover processes may stay.
  kill -0 $$ || exit
  exec /bin/bash -c '
trap "" TERM
mark=$1 word=$2 command=$3
# Set `left` to the processes with the mark. Return false if there are none and the command has begun: before that, its
# process id still runs this script, which has the mark among its arguments.
find_left() {
  grep -qs "$mark" /proc/$command/cmdline
  begun=$?
  left=$(grep -lzsx "TPUSWARM_EXEC=$mark" /proc/[0-9]*/environ | cut -d/ -f3)
  [ -n "$left" ] || [ $begun = 0 ]
}
interrupted=
for ((turn = 0; turn < 100; turn++)); do
  [ "$word" = now ] && break
  find_left || exit
  [ -n "$left" ] && [ -z "$interrupted" ] && interrupted=yes && kill -INT $left
  [ $turn = 50 ] && kill -TERM $left
  read -rt 0.1 word <&3
  [ $? = 1 ] && sleep 0.1
done
while find_left; do kill -KILL $left; sleep 0.05; done
' tpuswarm-end "$2" "$word" $$
} >/dev/null 2>&1 &
exec 3<&-
# doctor/processes.py tells the command from what it left running by its process id.
export TPUSWARM_EXEC="$2" TPUSWARM_EXEC_PID=$$
exec /bin/bash -c "$1"
