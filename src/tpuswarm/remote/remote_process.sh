# Run the shell line $1 until it ends, or until our caller ends it. Its processes inherit the mark $2.
# Standard input controls it: a word, or the end of input (a lost connection), ends all that belongs to the command:
# SIGINT first, SIGTERM later, SIGKILL at last or after the word `now`.
# The fast path runs in any /bin/sh; only ending processes needs bash.
exec 3<&0 </dev/null
{
  read -r word <&3
  # The command has this shell's process id. If it has ended by itself, its leftover processes may stay.
  kill -0 $$ || exit
  exec /bin/bash --norc -c '
trap "" TERM
mark=$1 word=$2 command=$3 left=
# Set `left` to the processes that have the mark, or are of the command'"'"'s session, and all that descend from them: sudo
# drops the mark. Return false if there are none and the command has begun: before that, its process id still runs this
# script, which has the mark among its arguments.
find_left() {
  grep -qs "$mark" /proc/$command/cmdline
  begun=$?
  left="$left $(grep -lzsx "TPUSWARM_EXEC=$mark" /proc/[0-9]*/environ | cut -d/ -f3)"
  left=$(cat /proc/[0-9]*/status 2>/dev/null | awk -v roots="$left" -v session=$command -v self=$$ "
    function add_descendants(set, pid, more) {
      do { more = 0; for (pid in parent) if (!(pid in set) && parent[pid] in set) { set[pid]; more = 1 } } while (more)
    }
    /^State:/ { is_dead = \$2 ~ /[ZX]/ }
    /^Pid:/ { pid = \$2 }
    /^PPid:/ && !is_dead { parent[pid] = \$2 }
    /^NSsid:/ && !is_dead && \$2 == session { found[pid] }
    END {
      count = split(roots, root)
      for (number = 1; number <= count; number++) if (root[number] in parent) found[root[number]]
      add_descendants(found)
      ours[self]
      add_descendants(ours)
      for (pid in found) if (!(pid in ours)) print pid
    }")
  [ -n "$left" ] || [ $begun = 0 ]
}
send() {
  others=
  for pid in $left; do kill -$1 $pid || others="$others $pid"; done
  [ -z "$others" ] || sudo -n kill -$1 $others
}
interrupted=
for ((turn = 0; turn < 100; turn++)); do
  [ "$word" = now ] && break
  find_left || exit
  [ -n "$left" ] && [ -z "$interrupted" ] && interrupted=yes && send INT
  [ $turn = 50 ] && send TERM
  read -rt 0.1 word <&3
  [ $? = 1 ] && sleep 0.1
done
for ((turn = 0; turn < 100; turn++)); do find_left || exit; send KILL; sleep 0.05; done
' tpuswarm-end "$2" "$word" $$
} >/dev/null 2>&1 &
exec 3<&-
# doctor/processes.py tells the command from what it left running by its process id.
export TPUSWARM_EXEC="$2" TPUSWARM_EXEC_PID=$$
exec /bin/bash --norc -c "$1"
